"""Check 8: gpt_1b3 is saved in the background while it trains; the checkpoint is intact and resumes the same losses."""

import shutil
import time
from pathlib import Path

from benchmarks.gpu import runs
from benchmarks.gpu.check import CheckContext, Outcome, Unavailable, largest_difference
from benchmarks.gpu.ranks import in_process
from benchmarks.gpu.speed import GPT_1B3
from benchmarks.gpu.timing import device_of
from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes, compose
from gpt4d.model import registry
from gpt4d.planner.workload import training_state
from gpt4d.trainer import Trainer

_STEPS, _SAVED = 10, 5
_BOUND = 1e-3  # relative difference of a loss after resuming; a run promises no bits without train.deterministic
_SPACE = 1.2  # times the size of the checkpoint


def check(context: CheckContext) -> Outcome:
    outcome, device = Outcome(), device_of(context.device_type)
    overrides = [
        *GPT_1B3.overrides(context.rehearsal),
        *GPT_1B3.write_corpus(context),
        f"train.batch_size={GPT_1B3.micro_batches[0]}",
        f"train.steps={_STEPS}",
        "train.precision=bf16",
        "logging.every=1",
        f"checkpoint.every={_SAVED}",
    ]
    require_space(context, overrides)
    run_dirs = {name: context.directory / name for name in ("uninterrupted", "resumed")}
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
    outcome.require(difference <= _BOUND, f"losses after resuming differ by up to {difference:.1e}")
    step_times = {line["step"]: line["step_time_s"] for line in runs.logged_steps(run_dirs["uninterrupted"])}
    outcome.values = {
        "blocked_s": saved["blocked_s"],
        "seconds": saved["seconds"],
        "bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
        "tensors": tensors,
        "verify_s": verify_s,
        "difference": difference,
        "step_times_s": step_times,
    }
    gigabytes = outcome.values["bytes"] / 1e9
    outcome.figure = (
        f"{gigabytes:.3g} GB in {saved['seconds']:.1f} s, training blocked for {saved['blocked_s']:.2f} s, "
        f"losses within {difference:.1e}"
    )
    return outcome


def _count_tensors(path: Path) -> int:
    """Return the number of tensors of a checkpoint. Raises Damaged if it is not intact."""
    checkpoint = Checkpoint(path)
    storage.verify(checkpoint)
    return len(checkpoint.files.tensors)


def require_space(context: CheckContext, overrides: list[str]) -> None:
    """Raise Unavailable if the disk is too small for a checkpoint of the configuration."""
    config = compose(overrides)
    state = training_state(registry.describe(config.model), GridSizes(), shard_states=False)
    needed = _SPACE * (state["weights"] + state["optimizer"])
    free = shutil.disk_usage(context.directory).free
    if free < needed:
        raise Unavailable(
            f"{context.directory.parent} has {free / 1e9:.0f} GB of free space for a checkpoint of "
            f"{needed / 1e9:.0f} GB; set TMPDIR to a directory with more"
        )


def _save_once(trainer: Trainer) -> None:
    """Save in the middle only: the save at a run's end would take as long again, and nothing would run beside it."""
    runs.save_only_at(_SAVED)
