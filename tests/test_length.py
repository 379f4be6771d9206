"""The length of a run in tokens and in epochs."""

import json
import math
from pathlib import Path

import pytest

from gpt4d.config import ConfigError, profiled_steps, with_epochs
from gpt4d.config.length import with_steps
from gpt4d.model import registry  # noqa: F401 – registers the families' settings
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.settings import configured


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ("", 600), ("train.steps=7", 7), ("train.tokens=2048", 1), ("train.tokens=2049", 2),
        ("train.tokens=1000000000", math.ceil(1e9 / 2048)), ("train.tokens=2049 train.steps=2", 2),
    ],
)  # fmt: skip
def test_tokens_are_rounded_up_to_complete_steps(settings, steps):
    config = configured(["train.batch_size=8", "train.seq_len=256", *settings.split()])
    assert config.train.steps == steps
    assert with_steps(config) == config


@pytest.mark.parametrize(("epochs", "steps"), [(1, 13), (2, 25), (0.5, 7), (0.01, 1)])
def test_epochs_are_rounded_up_to_complete_steps(epochs, steps):
    config = configured([f"train.epochs={epochs}", "train.batch_size=8"])
    assert with_epochs(config, 100).train.steps == steps


def test_one_key_sets_the_length():
    mistakes = [
        ("train.tokens=5 train.epochs=2", "train.epochs=2.0: train.tokens=5 sets the length"),
        ("train.tokens=5 train.steps=9", "train.steps=9: train.tokens=5 sets the length"),
        ("train.epochs=2 train.steps=9", "train.steps=9: train.epochs=2.0 sets the length; set only one"),
        ("train=finetune train.steps=9", "train.steps=9: train.epochs=3.0 sets the length; set only one"),
        ("train.tokens=0", "train.tokens=0: use a value above 0"),
        ("train.epochs=-1", "train.epochs=-1.0: use a value above 0"),
        ("model=unet_tiny train.tokens=5", "trained on images; use train.epochs or train.steps"),
        (
            "model=unet_tiny train.epochs=2 train.steps=90",
            "^train.steps=90: train.epochs=2.0 sets the length; set only",
        ),
    ]
    assert not wrong_messages(mistakes, lambda settings: configured(settings.split()))
    assert configured(["train=finetune", "train.epochs=null", "train.steps=9"]).train.steps == 9


def test_a_traced_step_beyond_the_epochs_is_rejected_once_their_length_is_known():
    config = configured(["train.epochs=1", "profile.steps=700"])
    validate(config, 1)
    assert profiled_steps(with_epochs(config, 8000)) == (700, 700)
    with pytest.raises(ConfigError, match=r"the run ends with step train\.steps=10"):
        profiled_steps(with_epochs(config, 80))


def test_epochs_end_the_run_and_its_schedule_and_a_resume_may_extend_them(ranks, tiny):
    settings = "train.steps=600", "train.batch_size=64", "optim.warmup_steps=1"
    ranks.run(1, train_in_rank, tiny("train.epochs=0.5", *settings))
    run_dir = Path(tiny().run.dir)
    lines = metric_lines(run_dir)
    samples = json.loads((run_dir / "checkpoints" / f"step_{len(lines):08}" / "meta.json").read_text())["progress"]
    assert samples["samples"] == 64 * len(lines)
    assert lines[-1]["lr"] < 0.5 * lines[1]["lr"], "the cosine ends with the run"
    ranks.run(1, train_in_rank, tiny("train.epochs=1", *settings))
    assert metric_lines(run_dir)[-1]["step"] in (2 * len(lines), 2 * len(lines) - 1)


@pytest.mark.parametrize("model", ["unet_tiny", full("utransformer_tiny")])
def test_epochs_replace_the_steps_of_a_models_file(model):
    assert configured([f"model={model}"]).train.steps == 300
    config = configured([f"model={model}", "train.epochs=2", "train.batch_size=10"])
    assert with_epochs(config, 100).train.steps == 20
    finetuned = configured([f"model={model}", "train=finetune", "train.batch_size=10"])
    assert finetuned.train.epochs == 3 and with_epochs(finetuned, 100).train.steps == 30
