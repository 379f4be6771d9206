"""The reference of settings and the help of train.py print metadata, and the documentation agrees with it."""

import re
from pathlib import Path

import pytest

from gpt4d import run
from gpt4d.config import CONFIG_DIR, Config, ConfigError, known_keys, reference, value_of
from gpt4d.config import __main__ as command
from gpt4d.config.keys import settings
from gpt4d.config.reference import default_text, explain
from tests.support.settings import configured

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/configuration.md"
DEFAULTS = {each.key: default_text(each) for each in settings() if not each.family}


def test_a_key_is_explained_with_default_type_limits_and_meaning():
    assert explain(["train.micro_batch_size"]) == (
        "train.micro_batch_size=null  (int or null, at least 1)\n"
        "    samples of a forward on a device; null: its share of the batch"
    )
    assert explain(["data.shuffle"]).splitlines()[0] == "data.shuffle=true  (bool)"
    assert "one of fp32, bf16" in explain(["train.precision"]).replace("auto, ", "")


def test_families_with_different_settings_of_one_key_are_listed():
    lines = explain(["model.layers"]).splitlines()
    keys, meanings = lines[::2], lines[1::2]
    assert all(key.startswith("model.layers=") for key in keys) and len({*keys}) == len(keys) > 1
    assert "    number of blocks" in meanings  # a family may state no meaning
    assert re.search(r"\[.*gpt2, llama, moe, olmo2.*\]", explain(["model.layers"]))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["warmup"], {"optim.warmup_steps"}),
        (["Cosine", "schedule"], {"optim.schedule", "optim.schedule_steps", "model.noise_schedule"}),
        (["gradients", "average"], {"optim.beta1", "optim.beta2", "optim.muon.momentum"}),
        (["learning_rate"], {"optim.lr"}),  # a name of other trainers
        (["checkpoint.keep"], {"checkpoint.keep"}),  # not checkpoint.keep_every
    ],
)
def test_a_word_finds_keys_by_their_name_and_meaning(words, keys, capsys):
    command.main(words)
    found = {line.partition("=")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert found == keys


def test_no_word_lists_every_key():
    text = explain([])
    assert all(f"{key}=" in text for key in known_keys() if not key.startswith("model."))


def test_a_word_without_a_key_is_one_line():
    with pytest.raises(ConfigError, match=r"^quux: there is no such key; use one of"):
        explain(["quux"])


def test_the_defaults_of_the_reference_are_valid_on_a_command_line():
    groups = ("optim", "parallel", "checkpoint", "logging", "cluster")
    shown = {key: text for key, text in DEFAULTS.items() if key.startswith(groups)}
    composed = configured([f"{key}={text}" for key, text in shown.items()])
    for key in shown:
        assert value_of(composed, key) == value_of(Config(), key), key
    assert len(shown) > 60


def test_help_explains_the_first_settings_and_lists_all_choices(capsys):
    run.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    found = {each.key: each for each in settings()}
    assert {"train.steps", "optim.lr", "parallel.gdata", "run.dir"} < {*reference.FIRST}
    for key in set(reference.FIRST) - {"model", "data"}:
        assert f"{key}={DEFAULTS[key]} {found[key].field.metadata['meaning']}" in text, key
    assert "model=llama_tiny " in text and "data=sotu " in text
    for path in CONFIG_DIR.glob("*/*.yaml"):
        assert path.stem in text, path


def documented_keys():
    """Yield the cells of every row of docs/reference/configuration.md that begins with keys, and these keys."""
    for row in re.findall(r"^\| (`.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        cell, _, meaning = row.partition(" | ")
        keys: list[str] = []
        for name in " ".join(re.findall(r"`([^`]*)`", cell)).split():
            group = keys[-1].rpartition(".")[0] if keys and "." not in name else ""
            keys.append(f"{group}.{name}" if group else name)
        yield keys, meaning


def test_the_table_of_the_documentation_has_existing_keys_and_their_defaults():
    rows = list(documented_keys())
    known, found = {*known_keys(), "model", "data", "train", "cluster"}, 0
    for keys, meaning in rows:
        for key in keys:
            assert key in known or (key.endswith(".*") and any(each.startswith(key[:-1]) for each in known)), key
        for value in re.findall(r"`([^`]*)` \(default\)", meaning):
            if keys[0] in DEFAULTS:
                assert DEFAULTS[keys[0]] == value, keys
                found += 1
    assert len(rows) > 35 and found > 4
