"""Training runs of checks, through the configuration and the trainer, and their lines in metrics.jsonl."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gpt4d.checkpoint.run import RunCheckpoints
from gpt4d.data.tokenizers import END_OF_TEXT
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.gpu import compiling
from tests.gpu.check import Check, Unavailable
from tests.gpu.processes import in_process
from tests.support.grids import metric_lines as logged_steps
from tests.support.run_files import events  # noqa: F401 – for the checks
from tests.support.settings import configured

# A model for rehearsals, which trains on sequences of 32 tokens.
TINY_VOCABULARY = 300
_TINY_TEXT = f"model.layers=2 model.hidden=32 model.heads=4 model.vocab_size={TINY_VOCABULARY} model.max_positions=32"
_TINY_GPT = ["model=gpt_tiny", *_TINY_TEXT.split()]
TINY_LLAMA = [*_TINY_TEXT.split(), "model.key_value_heads=2", "model.head_size=8", "model.inner=64"]
TINY_UNET = [
    "model.channels=16", "model.multipliers=[1,2]", "model.attention_at=[16]", "model.head_size=8", "model.groups=4",
]  # fmt: skip
_COMMON = [
    "data.validation_fraction=0", "train.validate_every=0", "train.validation_batches=0", "checkpoint.every=0",
    "logging.sample_tokens=0", "optim.algorithm=adamw", "optim.warmup_steps=5",
]  # fmt: skip
_TEXT = ["data=jsonl", "data.processes=1"]
_IMAGE_SIZE, _IMAGES = 32, 64
_CORPUS_TOKENS = {"cuda": 400_000, "cpu": 20_000}
# Called before the first step. It may return a function whose result a run reports at its end.
Prepare = Callable[[Trainer], Callable[[], Any] | None]


@dataclass(frozen=True)
class Workload:
    """A model to train, its microbatches, and the minimum MFU that passes."""

    model: str
    length: int
    micro_batches: tuple[int, ...]
    mfu: float
    vocabulary: int = 50257

    def overrides(self, rehearsal: bool) -> list[str]:
        """Return the overrides that select the model and the length of its sequences."""
        return _TINY_GPT if rehearsal else [f"model={self.model}", f"train.seq_len={self.length}"]

    def write_corpus(self, check: Check) -> list[str]:
        vocabulary = TINY_VOCABULARY if check.rehearsal else self.vocabulary
        return write_corpus(check.directory, vocabulary, _CORPUS_TOKENS[check.device_type])


GPT_1B3 = Workload("gpt_1b3", 2048, (4, 16), 0.45)
GPT_125M = Workload("gpt_125m", 1024, (16, 64), 0.25)


def small_corpus(check: Check, tokens: int) -> list[str]:
    return write_corpus(check.directory, TINY_VOCABULARY if check.rehearsal else 4096, tokens)


def gpt_tiny(check: Check, tokens: int) -> list[str]:
    """Write a corpus, and return the overrides that train gpt_tiny on it; the model is smaller in a rehearsal."""
    return [*(_TINY_GPT if check.rehearsal else ["model=gpt_tiny"]), *small_corpus(check, tokens)]


def write_corpus(directory: Path, vocabulary: int, tokens: int) -> list[str]:
    """Write random documents and their tokenizer, and return the overrides that select them.

    All ``vocabulary`` token ids occur alike, so that the embedding takes at least the time of real text.
    """
    words = [END_OF_TEXT, *(f"w{token}" for token in range(1, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "words.json"))
    draw = random.Random(0)
    with open(directory / "documents.jsonl", "w") as file:
        while tokens > 0:
            length = draw.randrange(10, 1000)
            file.write(json.dumps({"text": " ".join(draw.choices(words[1:], k=length))}) + "\n")
            tokens -= length
    return [
        *_TEXT, *_COMMON, f"data.path={directory / 'documents.jsonl'}", f"data.tokenizer={directory / 'words.json'}",
        f"data.cache_dir={directory / 'cache'}",
    ]  # fmt: skip


def write_images(directory: Path) -> list[str]:
    """Write random images, and return the overrides that select them."""
    from PIL import Image

    folder = directory / "images"
    folder.mkdir()
    for number in range(_IMAGES):
        pixels = random.Random(number).randbytes(3 * _IMAGE_SIZE**2)
        Image.frombytes("RGB", (_IMAGE_SIZE, _IMAGE_SIZE), pixels).save(folder / f"{number}.png")
    return ["data=pictures", *_COMMON, f"data.path={folder}", f"data.cache_dir={directory / 'cache'}"]


def train(overrides: list[str], device: torch.device, prepare: Prepare = lambda trainer: None) -> Any:
    """Train on ``device`` in a process of its own, and return the report of the function that ``prepare`` returns."""
    return in_process(_train, overrides, device, prepare)


def _train(overrides: list[str], device: torch.device, prepare: Prepare) -> Any:
    if device.type == "cpu":
        compiling.trace_only()
    config = configured(overrides)
    with process_group(Launch(), device, deterministic=config.train.deterministic) as job:
        trainer = Trainer(validate(config, 1), job.device)
        report = prepare(trainer)
        trainer.run()
        return report() if report else None


def never_save(trainer: Trainer, except_at: int | None = None) -> None:
    """Let runs in this process save after a step alone, or never: the save at a run's end takes long."""
    save = RunCheckpoints.save

    def save_or_not(self: RunCheckpoints, train_step: Any, progress: Any, validation: Any) -> None:
        if progress.step == except_at:
            save(self, train_step, progress, validation)

    RunCheckpoints.save = save_or_not


def losses(run_dir: Path) -> dict[int, float | None]:
    """Return the loss of each logged step; None if it was not finite."""
    return {line["step"]: line["loss"] for line in logged_steps(run_dir)}


def measured_runs(check: Check) -> dict[str, Any]:
    """Return the values of check 6: its ``runs``, one per microbatch, and the ``best``. Raises Unavailable if none."""
    if "best" not in check.earlier.get(6, {}):
        raise Unavailable("check 6 has no result; run --part=2 before")
    return check.earlier[6]
