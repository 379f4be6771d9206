"""A model is imported, extended to longer sequences, trained and exported; transformers computes the same loss."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.__main__ import main as checkpoint_command
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError
from gpt4d.data.corpus import corpus as prepared
from gpt4d.validation import validate
from tests.support.chat import write_tokenizer
from tests.support.checkpoint_sources import GEMMA3, MODEL, OLMO2, save
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.run_files import events
from tests.support.settings import configured

ORIGINAL, LENGTH = 64, 256
YARN = ["model.rope_scaling=yarn", "model.rope_factor=4", f"model.rope_original_positions={ORIGINAL}"]
MODELS = {
    "llama": (MODEL, YARN),
    "olmo2": (
        replace(OLMO2, rope_scaling="none", rope_factor=1.0, rope_original_positions=0),
        ["model.rope_scaling=linear", "model.rope_factor=4"],
    ),
    "gemma3": (GEMMA3, ["model.rope_linear_factor=32"]),
}


@pytest.fixture
def imported(tmp_path, capsys):
    """Return a function that imports a random model of transformers, and the settings that the import prints."""

    def build(family):
        source, run = tmp_path / "source", tmp_path / "imported"
        source.mkdir()
        save(source, replace(MODELS[family][0], vocab_size=300, max_positions=ORIGINAL))
        for path in write_tokenizer(tmp_path / "tokenizer").iterdir():
            settings = json.loads(path.read_text())
            if path.name == "tokenizer_config.json":
                # Gemma's config.json selects a class that adds tokens, which this vocabulary lacks.
                settings |= {"model_max_length": ORIGINAL, "tokenizer_class": "PreTrainedTokenizerFast"}
            (source / path.name).write_text(json.dumps(settings))
        checkpoint_command(["import", f"source={source}", f"out={run}"])
        return run, re.findall(r"model(?:\.\w+)?=\S+", capsys.readouterr().out.partition("conversations")[0])

    return build


@pytest.mark.parametrize("family", ["llama", full("olmo2"), full("gemma3")])
def test_an_extended_import_is_exported_with_the_same_validation_loss(ranks, tiny, imported, tmp_path, family):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, model = imported(family)
    config = tiny(
        "train=long_context", *model, f"checkpoint.init={run}", f"data.tokenizer={run}",
        f"model.max_positions={LENGTH}", *MODELS[family][1], f"train.seq_len={LENGTH}", "train.batch_size=2",
        "train.steps=2", "train.validate_every=2", "train.validation_batches=2", "optim.lr=1e-3", "parallel.gx=2",
    )  # fmt: skip
    ranks.run(2, train_in_rank, config)
    assert [line["step"] for line in metric_lines(config.run.dir)] == [1, 2]
    changed = {line["key"]: (line["before"], line["after"]) for line in events(config.run.dir, "change")}
    assert changed.pop("model.max_positions") == (ORIGINAL, LENGTH)
    assert changed.keys() == {override.partition("=")[0] for override in MODELS[family][1]}
    checkpoint_command(["export", f"checkpoint={config.run.dir}", f"out={tmp_path / 'out'}"])

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.max_position_embeddings == LENGTH
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == LENGTH
    tokens = torch.from_numpy(prepared(config.data).first.tokens("validation")[: 4 * LENGTH + 1].astype("int64"))
    ids, targets = tokens[:-1].view(4, LENGTH), tokens[1:].view(4, LENGTH)
    with torch.no_grad():
        loss = F.cross_entropy(theirs(ids).logits.flatten(0, 1), targets.flatten()).item()
    (validation,) = events(config.run.dir, "validation")
    assert validation["loss"] == pytest.approx(loss, abs=1e-6)


def test_initial_weights_of_other_positions_need_equal_shapes_and_a_resume_needs_equal_positions(tiny, imported):
    run, model = imported("llama")
    extended = [*model, f"model.max_positions={LENGTH}", *YARN]
    fits = tiny(*extended, f"checkpoint.init={run}")
    assert checkpoint_dir.initial(fits).path == Checkpoint.open(run).path
    with pytest.raises(ConfigError, match=r"model\.inner=40: the checkpoint .* has 48; use that value or set another"):
        checkpoint_dir.check_run(tiny(*extended, "model.inner=40", f"checkpoint.init={run}"))
    with pytest.raises(ConfigError, match=r"model\.max_positions=256: the checkpoint .* has 64; use that value or set"):
        checkpoint_dir.check_run(tiny(*extended, f"run.dir={run}"))


def test_learned_positions_of_initial_weights_cannot_be_extended(ranks, tiny, tmp_path):
    source = tiny("train.steps=1", f"run.dir={tmp_path / 'source'}")
    ranks.run(1, train_in_rank, source)
    with pytest.raises(ConfigError, match=r"model\.max_positions=64: the checkpoint .* has 32; use that value or set"):
        checkpoint_dir.check_run(tiny("model.max_positions=64", f"checkpoint.init={source.run.dir}"))


YARN_4 = "model.rope_scaling=yarn model.rope_factor=4 model.rope_original_positions=256"
EXTENSIONS = [  # a length beyond the model's, and the settings that extend the model
    ("model=llama_tiny train.seq_len=1024", f"model.max_positions=1024 {YARN_4}"),
    ("model=olmo2_tiny train.seq_len=1000",
     f"model.max_positions=1000 {YARN_4.replace('factor=4', 'factor=3.90625')}"),
    ("model=llama_tiny model.rope_scaling=linear model.rope_factor=2 train.seq_len=1024",
     "model.max_positions=1024 model.rope_factor=8"),
    ("model=llama_1b train.seq_len=524288", "model.max_positions=524288 model.rope_factor=64"),
    ("model=llama_1b train.seq_len=262144", "model.max_positions=262144"),
    ("model=gemma3_tiny model.rope_linear_factor=8 train.seq_len=512",
     "model.max_positions=512 model.rope_linear_factor=16"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "settings"), EXTENSIONS)
def test_a_length_beyond_the_models_is_rejected_with_overrides_that_extend_it(words, settings):
    words = [*words.split(), "cluster=dgx_h100", "cluster.memory_gib=1e6"]
    expected = r"^train\.seq_len=\d+: longer than model\.max_positions=\d+; lower it.* extend a trained model by RoPE "
    expected += f"scaling with {re.escape(settings)}, or train a new model"
    with pytest.raises(ConfigError, match=expected):
        validate(configured(words), 1)
    validate(configured([*words, *settings.split()]), 1)


RECIPES = [  # settings, length and batch size
    ("model=qwen3_8b", 32768, 32),
    ("model=llama_tiny train.seq_len=192", 192, 4096),
    ("model=llama_1b model.max_positions=2000000", 2000000, 1),
    ("model=llama_tiny train.batch_size=3", 256, 3),
]


@pytest.mark.parametrize(("words", "length", "sequences"), RECIPES)
def test_a_step_of_the_recipe_has_about_a_million_tokens(words, length, sequences):
    config = configured(["train=long_context", *words.split()])
    assert (config.train.seq_len, config.train.batch_size) == (length, sequences)
    assert (config.optim.algorithm, config.optim.lr, config.optim.warmup_steps) == ("adamw", 2e-5, 20)
