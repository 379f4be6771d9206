"""Check 8: gpt_1b3 is saved in the background while it trains; the checkpoint is intact and resumes the same losses."""

import shutil
import statistics
import time
from pathlib import Path

import pytest

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes
from gpt4d.model import registry
from gpt4d.planner.workload import training_state
from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check, Unavailable, largest_difference
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3
from tests.support.settings import configured

_STEPS, _SAVED = 10, 5
_BOUND = 1e-3  # relative difference of a loss after resuming; a run promises no bits without train.deterministic
_SPACE = 1.2  # times the size of the checkpoint


@pytest.mark.gpu(number=8, part=2, limit_s=125, work_s=105)
def test_a_checkpoint_of_gpt_1b3_is_intact_and_resumes(check: Check) -> None:
    device = check.device
    overrides = [
        *GPT_1B3.overrides(check.rehearsal),
        *GPT_1B3.write_corpus(check),
        f"train.batch_size={GPT_1B3.micro_batches[0]}",
        f"train.steps={_STEPS}",
        "train.precision=bf16",
        "train.compile=false",
        "logging.every=1",
        f"checkpoint.every={_SAVED}",
    ]
    require_space(check, in_process(checkpoint_bytes, overrides))
    run_dirs = {name: check.directory / name for name in ("uninterrupted", "resumed")}
    runs.train([*overrides, f"run.dir={run_dirs['uninterrupted']}"], device, _save_once)
    (saved,) = runs.events(run_dirs["uninterrupted"], "checkpoint")
    checkpoint = Path(saved["path"])
    started = time.monotonic()
    tensors = in_process(_count_tensors, checkpoint)
    verify_s = time.monotonic() - started
    resume = [f"checkpoint.resume={checkpoint}", f"run.dir={run_dirs['resumed']}"]
    runs.train([*overrides, *resume], device, _save_once)

    expected, actual = (runs.losses(run_dir) for run_dir in run_dirs.values())
    assert list(actual) == list(range(_SAVED + 1, _STEPS + 1)), f"the resumed run has the steps {list(actual)}"
    difference = largest_difference(actual.values(), list(expected.values())[_SAVED:])
    check.require(difference <= _BOUND, f"losses after resuming differ by up to {difference:.1e}")
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
    gigabytes = check.values["bytes"] / 1e9
    check.figure = (
        f"{gigabytes:.3g} GB in {saved['seconds']:.1f} s, a step delayed by {delay_s:.2f} s, "
        f"losses within {difference:.1e}"
    )


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


def _save_once(trainer: Trainer) -> None:
    """Save in the middle only: a save at the run's end doubles the time of the check and overlaps with nothing."""
    runs.save_only_at(_SAVED)
