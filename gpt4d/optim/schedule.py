"""The learning rate of each step. No torch here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt4d.config import Config, ConfigError, OptimConfig, length_key

# The keys that determine the shape of a schedule, but not its maximum.
_NAMES = "schedule", "min_lr_ratio", "warmup_steps", "schedule_steps", "decay_fraction", "decay_shape", "decay_from"
SCHEDULE_KEYS = tuple(f"optim.{name}" for name in _NAMES)
# The share of a decay that remains after a fraction of its steps.
_SHAPES = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the rate of update ``step``, from 0, in a run of ``steps`` steps.

    The rate of each ``optim.schedule`` rises linearly during the warm-up, to ``lr`` in its last step. Then:

    - ``cosine`` and ``linear`` fall to ``min_lr_ratio`` · ``lr`` at the end of the schedule.
    - ``wsd`` (warm-up, stable, decay) stays at ``lr`` until the decay begins, which has the shape ``decay_shape``.
    - ``constant`` stays at ``lr``.
    - ``inverse_sqrt`` is ``lr`` · sqrt(w / (step + 1)), where w is ``warmup_steps``, at least 1.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return config.lr * math.sqrt(max(1, config.warmup_steps) / (step + 1))
    begin, end = decay_bounds(config, steps)
    if config.schedule == "constant" or step < begin:
        return config.lr
    shape = _SHAPES[config.decay_shape if config.schedule == "wsd" else config.schedule]
    least = config.lr * config.min_lr_ratio
    return least + (config.lr - least) * shape(min(1.0, (step - begin) / max(1, end - begin)))


def decay_bounds(config: OptimConfig, steps: int) -> tuple[int, int]:
    """Return the step after which a schedule of a run of ``steps`` steps decays, and the step at which it ends."""
    end = config.schedule_steps or steps
    if config.schedule != "wsd":
        return config.warmup_steps, end
    if config.decay_from is not None:
        return config.decay_from, end
    return end - max(1, round(config.decay_fraction * end)), end


def check_schedule(config: Config) -> None:
    """Raise ConfigError if a decay begins before the end of the warm-up, or after the end of the run."""
    optim, train = config.optim, config.train
    if optim.schedule != "wsd":
        return
    begin, end = decay_bounds(optim, train.steps)
    if begin >= end:
        raise ConfigError(
            f"optim.decay_from={begin}: the decay ends with the run, at step {end}; use an earlier step, or raise "
            f"{length_key(train)}"
        )
    if begin < optim.warmup_steps:
        key = "decay_fraction" if optim.decay_from is None else "decay_from"
        raise ConfigError(
            f"optim.{key}={getattr(optim, key)}: the decay begins at step {begin}, before the end of the warm-up of "
            f"optim.warmup_steps={optim.warmup_steps}; lower one of them, or raise {length_key(train)}"
        )


def check_past_rates(before: Mapping[str, Any], config: Config, until: int, checkpoint: Path) -> None:
    """Raise ConfigError if a decay that branches off a checkpoint changes the rate of a step before the checkpoint.

    Args:
        before: the settings with which the checkpoint was trained, by key.
        config: the configuration of the run with the decay.
        until: the step of the checkpoint.
        checkpoint: its directory, for the message.
    """
    optim = OptimConfig(lr=before["optim.lr"], **{key.removeprefix("optim."): before[key] for key in SCHEDULE_KEYS})
    for step in range(until):
        rate = learning_rate(step, config.optim, config.train.steps)
        if rate != learning_rate(step, optim, before["train.steps"]):
            raise ConfigError(
                f"optim.decay_from={config.optim.decay_from}: with this decay, the learning rates differ from the "
                f"rates of {checkpoint} after step {step}; set checkpoint.resume to a checkpoint at or before that "
                "step, or add checkpoint.allow_changes=[optim]"
            )
