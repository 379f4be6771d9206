"""Check 3: training agrees with the CPU, resumes bit by bit, skips a non-finite step, and generates the same text."""

import math
from pathlib import Path

import pytest
import torch

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import Config, TrainConfig
from gpt4d.data import tokenizers
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task.generation import continuations
from gpt4d.task.sampling import GREEDY
from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check, largest_difference
from tests.gpu.processes import in_process

_STEPS = {"cuda": 20, "cpu": 6}
_BOUND = 1e-4  # relative difference of a loss to the CPU's
_NAN_STEP = 4
_PROMPTS, _NEW_TOKENS = ["w1 w2 w3", "w4"], 12


@pytest.mark.gpu(number=3, part=1, limit_s=75, work_s=55)
def test_training_agrees_with_the_cpu_and_resumes_bit_by_bit(check: Check) -> None:
    device, steps = check.device, _STEPS[check.device_type]
    common = [
        *runs.gpt_tiny(check),
        *runs.write_corpus(check.directory, runs.TINY_VOCABULARY if check.rehearsal else 4096, 100_000),
        f"train.steps={steps}",
        "train.precision=fp32",
        "train.compile=false",
        "logging.every=1",
        "model.dropout=0.1",
        # At gpt_tiny's best 4e-3 training is at the edge of stability, which amplifies rounding errors.
        "optim.lr=1e-3",
    ]

    def train(name: str, *overrides: str, on: torch.device = device, prepare: runs.Prepare = lambda _: None) -> Path:
        run_dir = check.directory / name
        runs.train([*common, *overrides, f"run.dir={run_dir}"], on, prepare)
        return run_dir

    exact, saving = "train.deterministic=true", f"checkpoint.every={steps // 2}"
    first = train("first", exact, saving)
    expected = runs.losses(train("cpu", on=torch.device("cpu")))
    actual = runs.losses(first)
    difference = largest_difference(actual.values(), expected.values())
    check.require(difference < _BOUND, f"losses differ from the CPU's by up to {difference:.1e}")
    check.values |= {"losses": list(actual.values()), "largest_difference": difference}

    again = train("again", exact)
    check.require(_bits(first) == _bits(again), "two runs with train.deterministic differ")

    saved = first / "checkpoints" / f"step_{steps // 2:08d}"
    resumed = train("resumed", exact, f"checkpoint.resume={saved}")
    same = _bits(resumed) == _bits(first)[steps // 2 :]
    check.require(same, "a resumed run with train.deterministic differs from the uninterrupted one")

    spoiled = train("nan", prepare=_spoil_gradient)
    skipped, last = runs.events(spoiled, "skipped"), runs.logged_steps(spoiled)[-1]
    check.values["skipped"] = [event["step"] for event in skipped]
    right = check.values["skipped"] == [_NAN_STEP] and last["step"] == steps and last["loss"] is not None
    check.require(right, f"after NaN in a gradient of step {_NAN_STEP}: skipped {skipped}, last line {last}")

    texts = check.values["texts"] = [in_process(_continue_prompts, saved, on) for on in (device, torch.device("cpu"))]
    check.require(texts[0] == texts[1], f"the generated texts differ from the CPU's: {texts}")
    check.figure = f"losses of {steps} steps within {difference:.1e} of the CPU's, NaN step skipped, texts equal"


def _bits(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of each step; JSON holds all bits of them."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.logged_steps(run_dir)]


def _continue_prompts(path: Path, device: torch.device) -> list[str]:
    """Return greedy continuations of some prompts by the model of a checkpoint, computed in fp32."""
    checkpoint = Checkpoint.open(path)
    config = Config(model=checkpoint.meta.model, train=TrainConfig(precision="fp32", compile=False))
    with process_group(Launch(), device):
        stage = build_stage(config, Grid(device_type=device.type), device, initialized=False)
        storage.load(checkpoint, stage.module, None, stage.grid)
        files = checkpoint.documents((tokenizers.FILE, *tokenizers.COMPANIONS))
        tokenizer = tokenizers.parse(files, str(path))
        end = tokenizers.end_of_text(tokenizer, files)
        return continuations(stage, tokenizer, end, _PROMPTS, _NEW_TOKENS, sampling=GREEDY)


def _spoil_gradient(trainer: Trainer) -> None:
    """Put NaN into the gradients of step ``_NAN_STEP``, while its loss stays finite."""

    def spoil(_module: torch.nn.Module, _inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if trainer.progress.step + 1 == _NAN_STEP:
            output[1].register_hook(lambda gradient: gradient * math.nan)

    trainer.stage.module.norm.register_forward_hook(spoil)
