"""Checks 3, 8, 13 and 14: complete runs of the trainer.

3: training agrees with the CPU, resumes bit by bit, skips a non-finite step, and generates the same text. 8: gpt_1b3 is
saved in the background while it trains; the checkpoint is intact and resumes the same losses. 13: torch's sanitizer
finds no unsynchronized access of two streams to the same memory. 14: steps that are replayed as CUDA graphs have the
losses of steps without graphs, and take less time.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import Config, GridSizes, TrainConfig
from gpt4d.data import tokenizers
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.planner.workload import training_state
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task.generation import GREEDY, continuations
from gpt4d.training.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check, Unavailable, largest_difference
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3
from tests.gpu.usage import reserved_gib, synchronize
from tests.support.settings import configured

_STEPS = {"cuda": 20, "cpu": 6}
_CPU_BOUND = 1e-4  # relative difference of a loss to the CPU's
_NAN_STEP = 4
_PROMPTS, _NEW_TOKENS = ["w1 w2 w3", "w4"], 12
_SAVING_STEPS, _SAVED = 10, 5
_RESUME_BOUND = 1e-3  # relative difference of a loss after resuming; a run promises no bits without train.deterministic
_SPACE = 1.2  # times the size of the checkpoint
_SANITIZED, _SAVE_EVERY = 4, 2
_GRAPH_STEPS, _TIMED = 16, 8  # the last steps are timed; after each validation, a step is recorded


@pytest.mark.gpu(number=3, part=1, limit_s=75, work_s=55)
def test_training_agrees_with_the_cpu_and_resumes_bit_by_bit(check: Check) -> None:
    device, steps = check.device, _STEPS[check.device_type]
    # At gpt_tiny's best learning rate, 4e-3, training is at the edge of stability, which amplifies rounding errors.
    common = [
        *runs.gpt_tiny(check, 100_000), f"train.steps={steps}", "train.precision=fp32", "train.compile=false",
        "logging.every=1", "model.dropout=0.1", "optim.lr=1e-3",
    ]  # fmt: skip

    def train(name: str, *overrides: str, on: torch.device = device, prepare: runs.Prepare = lambda _: None) -> Path:
        run_dir = check.directory / name
        runs.train([*common, *overrides, f"run.dir={run_dir}"], on, prepare)
        return run_dir

    exact, saving = "train.deterministic=true", f"checkpoint.every={steps // 2}"
    first = train("first", exact, saving)
    expected = runs.losses(train("cpu", on=torch.device("cpu")))
    actual = runs.losses(first)
    difference = largest_difference(actual.values(), expected.values())
    check.require(difference < _CPU_BOUND, f"losses differ from the CPU's by up to {difference:.1e}")
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
        stage = build_stage(one_stage(config), Grid(device_type=device.type), device, initialized=False)
        storage.load(checkpoint, stage.module, None, stage.grid)
        files = checkpoint.model_files()
        tokenizer = tokenizers.parse(files, str(path))
        end = tokenizers.end_of_text(tokenizer, files)
        return continuations(stage, tokenizer, end, _PROMPTS, _NEW_TOKENS, sampling=GREEDY)


def _spoil_gradient(trainer: Trainer) -> None:
    """Put NaN into the gradients of step ``_NAN_STEP``, while its loss stays finite."""

    def spoil(_module: torch.nn.Module, _inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if trainer.progress.step + 1 == _NAN_STEP:
            output[1].register_hook(lambda gradient: gradient * math.nan)

    trainer.stage.module.norm.register_forward_hook(spoil)


@pytest.mark.gpu(number=8, part=2, limit_s=125, work_s=105)
def test_a_checkpoint_of_gpt_1b3_is_intact_and_resumes(check: Check) -> None:
    device = check.device
    overrides = [
        *GPT_1B3.overrides(check.rehearsal), *GPT_1B3.write_corpus(check),
        f"train.batch_size={GPT_1B3.micro_batches[0]}", f"train.steps={_SAVING_STEPS}", "train.precision=bf16",
        "train.compile=false", "logging.every=1", f"checkpoint.every={_SAVED}",
    ]  # fmt: skip
    require_space(check, in_process(checkpoint_bytes, overrides))
    run_dirs = {name: check.directory / name for name in ("uninterrupted", "resumed")}
    # A save at the run's end doubles the time of the check and overlaps with nothing.
    save_once = partial(runs.never_save, except_at=_SAVED)
    runs.train([*overrides, f"run.dir={run_dirs['uninterrupted']}"], device, save_once)
    (saved,) = runs.events(run_dirs["uninterrupted"], "checkpoint")
    checkpoint = Path(saved["path"])
    started = time.monotonic()
    tensors = in_process(_count_tensors, checkpoint)
    verify_s = time.monotonic() - started
    resume = [f"checkpoint.resume={checkpoint}", f"run.dir={run_dirs['resumed']}"]
    runs.train([*overrides, *resume], device, save_once)

    expected, actual = (runs.losses(run_dir) for run_dir in run_dirs.values())
    assert list(actual) == list(range(_SAVED + 1, _SAVING_STEPS + 1)), f"the resumed run has the steps {list(actual)}"
    difference = largest_difference(actual.values(), list(expected.values())[_SAVED:])
    check.require(difference <= _RESUME_BOUND, f"losses after resuming differ by up to {difference:.1e}")
    step_times = {line["step"]: line["step_time_s"] for line in runs.logged_steps(run_dirs["uninterrupted"])}
    # The event also counts the wait at the end of the run, because ten steps take less time than the save.
    delay_s = step_times[_SAVED + 1] - statistics.median(step_times.values())
    check.values = {
        "delay_s": delay_s,
        "seconds": saved["seconds"],
        "bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
        "tensors": tensors,
        "verify_s": verify_s,
        "difference": difference,
        "step_times_s": step_times,
    }
    size, times = f"{check.values['bytes'] / 1e9:.3g} GB", f"a step delayed by {delay_s:.2f} s"
    check.figure = f"{size} in {saved['seconds']:.1f} s, {times}, losses within {difference:.1e}"


def _count_tensors(path: Path) -> int:
    """Return the number of tensors of a checkpoint. Raises Damaged if it is not intact."""
    checkpoint = Checkpoint(path)
    storage.verify(checkpoint)
    return len(checkpoint.files.tensors)


def checkpoint_bytes(overrides: list[str]) -> float:
    """Return the size of a checkpoint of the configuration."""
    config = configured(overrides)
    state = training_state(registry.describe(config.model), GridSizes(), config.optim)
    return state["weights"] + state["optimizer"]


def require_space(check: Check, size: float) -> None:
    """Raise Unavailable if the disk is too small for a checkpoint of ``size`` bytes."""
    needed, free = _SPACE * size, shutil.disk_usage(check.directory).free
    if free < needed:
        raise Unavailable(
            f"{check.directory.parent} has {free / 1e9:.0f} GB of free space for a checkpoint of "
            f"{needed / 1e9:.0f} GB; set TMPDIR to a directory with more"
        )


@pytest.mark.gpu(number=13, part=3, limit_s=25, work_s=20)
def test_the_sanitizer_finds_no_race_of_two_streams(check: Check) -> None:
    # The sanitizer knows torch's operations only.
    overrides = [
        *runs.gpt_tiny(check, 30_000), f"run.dir={check.directory / 'run'}", f"train.steps={_SANITIZED}",
        "train.batch_size=4", "train.micro_batch_size=2", "train.compile=false", f"checkpoint.every={_SAVE_EVERY}",
    ]  # fmt: skip
    found = runs.train(overrides, check.device, _sanitize)
    check.require(check.rehearsal or found, "torch's sanitizer does not find a race; the check shows nothing")
    check.figure = f"{_SANITIZED} steps and {_SANITIZED // _SAVE_EVERY} saves without a race"


def _sanitize(trainer: Trainer) -> Callable[[], bool]:
    """Let steps raise at an unsynchronized access. Return a function that says whether a planted race is found."""
    if trainer.device.type == "cpu":
        return lambda: False
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors

    mode = CUDASanitizerDispatchMode()

    def sanitized(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any) -> Any:
            with mode:
                return step(*args)

        return run

    def finds_a_race() -> bool:
        with mode, torch.cuda.stream(torch.cuda.Stream()):
            written = torch.ones(1 << 20, device=trainer.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                try:
                    written.add_(1)
                except CUDASanitizerErrors:
                    return True
        return False

    trainer.step = sanitized(trainer.step)  # type: ignore[method-assign]
    trainer.checkpoints.save = sanitized(trainer.checkpoints.save)  # type: ignore[method-assign]
    return finds_a_race


@pytest.mark.gpu(number=14, part=1, limit_s=30, work_s=25)
def test_replayed_steps_have_the_losses_of_steps_without_graphs(check: Check) -> None:
    overrides = [
        *runs.gpt_tiny(check, 100_000), f"train.steps={_GRAPH_STEPS}", "train.batch_size=16",
        "train.micro_batch_size=4", "train.compile=false", "train.deterministic=true", "data.validation_fraction=0.1",
        "train.validation_batches=1", "train.validate_every=4", "model.dropout=0.1", "logging.every=1",
    ]  # fmt: skip
    for name, graphs in (("eager", False), ("graphs", not check.rehearsal)):  # a CPU has no graphs
        run_dir = check.directory / name
        setting = [f"train.cuda_graphs={str(graphs).lower()}", f"run.dir={run_dir}"]
        check.values[name] = runs.train([*overrides, *setting], check.device, _observe)
        check.values[name]["losses"] = list(runs.losses(run_dir).values())
    eager, graphs = check.values["eager"], check.values["graphs"]
    difference = largest_difference(graphs["losses"], eager["losses"])
    check.require(difference == 0, f"losses with graphs differ by up to {difference:.1e}")
    faster = graphs["host_s"] < eager["host_s"] or check.rehearsal
    check.require(faster, f"the host takes {graphs['host_s']:.4f} s with graphs, {eager['host_s']:.4f} s without")
    check.figure = "; ".join(f"{name}: {_figure(check.values[name])}" for name in ("eager", "graphs"))


def _figure(values: dict[str, Any]) -> str:
    times = f"{values['step_s'] * 1e3:.1f} ms per step, {values['host_s'] * 1e3:.1f} ms of the host"
    return f"{times}, {values['reserved_gib']:.2f} GiB reserved"


def _observe(trainer: Trainer) -> Callable[[], dict[str, float]]:
    """Time the steps, and the host's part of each of them, while the GPU has nothing else to do."""
    runs.never_save(trainer)
    step, host, total = trainer.step, list[float](), list[float]()

    def observed(*args: Any) -> Any:
        synchronize(trainer.device)
        started = time.perf_counter()
        result = step(*args)
        host.append(time.perf_counter() - started)
        synchronize(trainer.device)
        total.append(time.perf_counter() - started)
        return result

    trainer.step = observed  # type: ignore[method-assign]
    return lambda: {
        "host_s": statistics.median(host[-_TIMED:]),
        "step_s": statistics.median(total[-_TIMED:]),
        "reserved_gib": reserved_gib(trainer.device, peak=True),
    }
