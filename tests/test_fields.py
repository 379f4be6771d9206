"""Meanings and limits of settings, and the reference and the help that print them. The documentation agrees."""

import math
import re
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest

from gpt4d.config import (
    CONFIG_DIR,
    Config,
    ConfigError,
    OptimConfig,
    check_limits,
    known_keys,
    redefined,
    reference,
    schema,
    setting,
    value_of,
)
from gpt4d.config import __main__ as command
from gpt4d.config.fields import Limits
from gpt4d.config.keys import settings
from gpt4d.config.reference import default_text, explain
from gpt4d.model import registry
from gpt4d.training import run
from tests.support.environment import REPOSITORY
from tests.support.settings import configured

SCHEMAS = [kind for kind in vars(schema).values() if isinstance(kind, type) and is_dataclass(kind)]
SCHEMAS += [registry.get(name).config for name in ("gpt2", "llama", "olmo2", "gemma3", "moe", "unet")]
FIELDS = [(kind, field) for kind in SCHEMAS for field in fields(kind) if not field.metadata.get("derived")]
LIMITED = [row for row in FIELDS if row[1].metadata["limits"] != Limits()]
RESOLVED = {"DataConfig": {"tokenizer_vocab": None}, "TrainConfig": {"seq_len": 1}}  # their defaults are interpolated
TEXT_FAMILIES = ("gpt2", "llama", "olmo2", "gemma3", "moe")
RESOLVED |= {registry.get(name).config.__name__: {"vocab_size": 1} for name in TEXT_FAMILIES}


def defaults(kind):
    return configured() if kind is schema.Config else kind(**RESOLVED.get(kind.__name__, {}))


def values_outside(limits):
    """Return a value next to each limit, on its wrong side, and a number that no comparison accepts."""
    if limits.choices:
        return ["other"]
    values = [math.nan]
    values += [] if limits.at_least is None else [limits.at_least - 1]
    values += [] if limits.at_most == math.inf else [limits.at_most * 2]
    return [*values, *(bound for bound in (limits.above, limits.below) if bound is not None)]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_setting_has_a_meaning_and_a_default_inside_its_limits(kind):
    assert not [field.name for of_kind, field in FIELDS if of_kind is kind and not field.metadata["meaning"]]
    check_limits(defaults(kind))


def test_a_value_outside_a_limit_is_reported_with_key_value_and_remedy():
    assert len(SCHEMAS) > 15 and len(FIELDS) > 150 and len(LIMITED) > 90
    values_of = {kind: defaults(kind) for kind in SCHEMAS}
    for kind, field in LIMITED:
        is_list = isinstance(getattr(kind(), field.name), list)
        for value in values_outside(field.metadata["limits"]):
            with pytest.raises(ConfigError) as raised:
                check_limits(replace(values_of[kind], **{field.name: [value] if is_list else value}), "group.")
            assert str(raised.value).startswith(f"group.{field.name}{'[0]' if is_list else ''}={value}: use ")


def test_limits_hold_in_nested_settings_and_in_lists():
    cluster = schema.ClusterConfig(levels=[schema.LevelConfig(), schema.LevelConfig(latency_us=-1)])
    with pytest.raises(ConfigError, match=r"^cluster\.levels\[1\]\.latency_us=-1: use a value of at least 0$"):
        check_limits(replace(configured(), cluster=cluster))


def test_a_redefined_setting_has_the_limits_of_its_base_and_lists_are_not_shared():
    @dataclass
    class Listing:
        numbers: list[int] = setting([1, 2], "numbers", at_least=1)

    Listing().numbers.append(3)
    assert Listing().numbers == [1, 2]

    @dataclass
    class Other(OptimConfig):
        lr: float = redefined(OptimConfig, "lr", 0.5)

    assert Other().lr == 0.5
    with pytest.raises(ConfigError, match=r"lr=-1: use a value of at least 0"):
        check_limits(Other(lr=-1))


PAGE = REPOSITORY / "docs/reference/configuration.md"
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


FOUND = {  # words and the keys that they find
    "warmup": {"optim.warmup_steps"},
    "Cosine schedule": {"optim.schedule", "optim.schedule_steps", "model.noise_schedule"},
    "gradients average": {"optim.beta1", "optim.beta2", "optim.muon.momentum"},
    "learning_rate": {"optim.lr"},  # a name of other trainers
    "checkpoint.keep": {"checkpoint.keep"},  # not checkpoint.keep_every
}


@pytest.mark.parametrize("words", FOUND)
def test_a_word_finds_keys_by_their_name_and_meaning(words, capsys):
    command.main(words.split())
    found = {line.partition("=")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert found == FOUND[words]


def test_no_word_lists_every_key_and_a_word_without_a_key_is_one_line():
    with pytest.raises(ConfigError, match=r"^quux: there is no such key; use one of"):
        explain(["quux"])
    text = explain([])
    assert all(f"{key}=" in text for key in known_keys() if not key.startswith("model."))


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
