"""The disk space of a run's checkpoints. No torch here."""

import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from gpt4d.config import Config, ConfigError
from gpt4d.optim.matrices import num_states
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.plan import ParallelPlan
from gpt4d.planner.workload import compute_bytes


class Space(NamedTuple):
    """Bytes of one checkpoint, maximum bytes of a run's checkpoints (None if unknown), and free bytes."""

    checkpoint: float
    most: float | None
    free: float

    def __str__(self) -> str:
        if self.most is None:
            return f"{readable_size(self.checkpoint)} per checkpoint; {readable_size(self.free)} are free"
        text = f"{readable_size(self.checkpoint)} per checkpoint, {readable_size(self.most)} at most"
        text += f"; {readable_size(self.free)} are free"
        return f"{text}: TOO LITTLE, use a larger disk or lower checkpoint.keep" if self.most > self.free else text


def check_space(plan: ParallelPlan) -> Space:
    """Return the space that a run's checkpoints take. Raises ConfigError if the first checkpoint does not fit."""
    config = plan.config
    tensors = 1 + (config.optim.ema_decay > 0)  # the weight and its average
    needed = 0
    for spec, count in plan.description.parameter_counts:
        states = num_states(spec, config.optim)
        nbytes = MASTER_BYTES * (tensors + states) if spec.has_master_dtype else compute_bytes(config) * tensors
        needed += count * math.prod(spec.stored_shape) * nbytes
    run_dir = Path(config.run.dir).resolve()
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"run.dir={config.run.dir}: {existing} is not writable; use another directory")
    free = shutil.disk_usage(existing).free
    if free < needed and config.run.world_size is None:  # otherwise the run may start on another machine
        raise ConfigError(
            f"run.dir={config.run.dir}: a checkpoint takes {readable_size(needed)}, and {readable_size(free)} are "
            "free; use a directory on a larger disk"
        )
    return Space(needed, _most(config, needed), free)


def _most(config: Config, needed: float) -> float | None:
    """Return the maximum bytes of all checkpoints that exist at once; None if the run's length is not known yet."""
    if config.train.epochs is not None:
        return None
    checkpoint, steps = config.checkpoint, config.train.steps
    saved = -(-steps // checkpoint.every) if checkpoint.every else 1
    kept = min(saved, checkpoint.keep)
    if checkpoint.keep_every:
        kept += steps // checkpoint.keep_every
    if checkpoint.keep_best:
        kept += 1
    return needed * min(saved, kept + 1)  # the oldest is removed after the next one is complete


def readable_size(nbytes: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"
