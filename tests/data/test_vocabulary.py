"""The vocabulary of a model has the size of the tokenizer of its data, unless a setting or a checkpoint states it."""

import itertools
import json
from dataclasses import replace

import pytest
import yaml
from tokenizers import Tokenizer

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.exporter import export
from gpt4d.config import ConfigError, compose
from gpt4d.data.completion import completion
from gpt4d.data.corpus import corpus as prepared
from gpt4d.planner import __main__ as planner
from gpt4d.training.dry_run import report
from gpt4d.validation import validate
from tests.support.data_files import random_documents, write
from tests.support.grids import train_in_rank
from tests.support.planted import VOCABULARY, plant_runs
from tests.support.settings import configured

DEFAULT = "model.vocab_size=null"  # as the files of tiny models
TINY = ("gpt_tiny", "llama_tiny", "olmo2_tiny", "gemma3_tiny")


@pytest.fixture
def tokens(small):
    """Return a directory of token files, and the size of its tokenizer by the tokenizers library."""
    directory = prepared(replace(small, tokenizer_vocab=281)).first.directory
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    assert size == 281
    return directory, size


def test_the_default_is_the_size_of_the_tokenizer_of_the_data(tokens, tmp_path):
    (directory, size), models = tokens, itertools.cycle(TINY)
    tokenizer = f"data.tokenizer={directory}"
    prefix, large = write(tmp_path / "a", random_documents()), "model=gpt_125m"
    others = itertools.cycle([([large], 50257), ([large, DEFAULT], size), (["model.vocab_size=999"], 999)])
    for words in (
        ["data=tokens", f"data.path={directory}"],
        ["data=blend", f"data.blend={{{prefix}: 1, {directory}: 2}}"],
        ["data=blend", f"data.blend={{0: {{{prefix}: 1}}, 0.5: {{{directory}: 2}}}}"],
        ["data=megatron", f"data.path={prefix}", tokenizer],
        ["data=blend", f"data.blend={{{prefix}: 1}}", tokenizer],
        ["data=text", "data.path=*.py", tokenizer],
        ["data=text", "data.path=*.py", f"{tokenizer}/tokenizer.json", "data.stream=true"],
    ):
        config = configured([f"model={next(models)}", *words])
        assert (config.model.vocab_size, config.data.tokenizer_vocab) == (size, size), words
        stated, expected = next(others)
        assert configured([*words, *stated]).model.vocab_size == expected
    assert configured(["data.tokenizer=gpt2"]).model.vocab_size == 50257


def test_a_tokenizer_that_the_run_trains_determines_the_vocabulary():
    assert configured([]).model.vocab_size == configured([]).data.tokenizer_vocab == 8192
    assert configured(["data.tokenizer_vocab=700"]).model.vocab_size == 700
    config = configured(["model.vocab_size=700"])
    assert (config.model.vocab_size, config.data.tokenizer_vocab) == (700, 700)


def test_a_vocabulary_smaller_than_the_tokenizer_is_one_line_before_a_process_group_exists(tiny, tokens):
    directory, size = tokens
    for words in (["data=tokens", f"data.path={directory}"], ["data=sotu", f"data.tokenizer={directory}"]):
        with pytest.raises(ConfigError) as raised:
            validate(tiny(*words, "model.vocab_size=280", "data.tokenizer_vocab=280"), 1)
        assert str(raised.value) == (
            f"model.vocab_size=280: the tokenizer of data={words[0][5:]} has {size} tokens, and the model needs a row "
            f"for each; set model.vocab_size={size} or more, or use another tokenizer"
        )


def test_megatrons_files_without_a_tokenizer_need_a_size(tmp_path):
    words = ["data=megatron", f"data.path={write(tmp_path / 'a', random_documents())}"]
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=null: Megatron's files have no tokenizer, .*vocab_size$"):
        configured(words)
    assert configured([*words, "model.vocab_size=300"]).model.vocab_size == 300


def test_an_unusable_tokenizer_is_one_line():
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=no/such: not a usable tokenizer \(.*hub name$"):
        configured(["data.tokenizer=no/such"])
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=no\.json: no such file; use gpt2"):
        validate(configured(["data.tokenizer=no.json"]), 1)


def test_plans_contain_the_size_and_pad_it(tokens, capsys):
    directory, size = tokens
    data = ["data=tokens", f"data.path={directory}", "cluster=local"]
    for words, world in ((["parallel.gx=2", "parallel.gz=2"], 4), (["parallel.mode=auto"], 2)):
        plan = validate(configured([*data, *words]), world)
        assert plan.config.model.vocab_size == size
        assert plan.config.model.padded_vocab_size == -(-size // 128) * 128
    configs = map(configured, (data, [*data, f"model.vocab_size={size}"]))
    texts = (report(validate(config, 1), config, {}) for config in configs)
    dry = [[line for line in text.splitlines() if not line.startswith("disk")] for text in texts]
    assert dry[0] == dry[1]
    plans = []
    for model in ([], [f"model.vocab_size={size}"], ["model.vocab_size=8192"]):
        planner.main([*data, *model, "world_size=2", "format=json"])
        plans.append([plan["memory_gib"] for plan in json.loads(capsys.readouterr().out)])
    assert plans[0] == plans[1] != plans[2]


def test_a_run_stores_the_size_and_later_starts_keep_it(ranks, tiny, tokens, tmp_path):
    directory, size = tokens
    data = ["data=tokens", f"data.path={directory}", DEFAULT, "data.tokenizer_vocab=281"]
    ranks.run(1, train_in_rank, tiny(*data, "train.steps=1"))
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["vocab_size"] == size
    assert json.loads((run / "checkpoints/step_00000001/meta.json").read_text())["model"]["vocab_size"] == size
    export(Checkpoint(run / "checkpoints/step_00000001"), tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["vocab_size"] == size
    # Text whose own tokenizer has 300 tokens, read with the run's settings.
    for words in ([], *([f"run.dir={tmp_path}/b", f"checkpoint.{way}={run}"] for way in ("resume", "init"))):
        assert tiny(DEFAULT, *words).model.vocab_size == size
    assert tiny(DEFAULT, "checkpoint.resume=never").model.vocab_size == 300


def test_a_composition_reads_no_file_that_a_run_left(tmp_path, monkeypatch, tokens):
    directory, _ = tokens
    before = {model: compose([f"model={model}"]) for model in TINY}
    monkeypatch.chdir(plant_runs(tmp_path))
    for model, pure in before.items():
        assert compose([f"model={model}"]) == pure
        config, origins = completion(pure)
        assert (config.model.vocab_size, config.data.tokenizer_vocab) == (VOCABULARY, VOCABULARY)
        assert origins == {"model.vocab_size": f"the checkpoint runs/{model}-sotu/checkpoints/step_00000600"}
    assert completion(compose([f"data.tokenizer={directory}", "checkpoint.resume=never"])).origins == {
        "model.vocab_size": f"data.tokenizer={directory}"
    }
