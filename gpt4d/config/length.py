"""The length of a run in steps, and the sizes of its batches.

``train.steps``, or the equivalent of ``train.tokens`` or ``train.epochs``, is the length. The batch size
(``train.batch_ramp``, or ``train.batch_size``) is a function of the samples that a run has read. It begins with the
first step whose first sample is at or after the size's first sample. So it depends only on the position in the data,
not on the steps, the grid or the starts of a run.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gpt4d.config.conditions import trains_on_images
from gpt4d.config.fields import check_limits
from gpt4d.config.schema import Config, TrainConfig
from gpt4d.runtime.errors import ConfigError

DEFAULT_STEPS = TrainConfig.steps


def with_steps(config: Config, default: int = DEFAULT_STEPS) -> Config:
    """Return the configuration with the number of steps in which a run reads ``train.tokens``, if that is set.

    ``default``: the number of steps that the model's file sets, which ``train.tokens`` or ``train.epochs`` replaces.

    The last step may exceed ``train.tokens``, because its batch is complete. Raises ConfigError if several keys set the
    length, or if ``train.tokens`` is set for a model that is trained on images.
    """
    train = config.train
    check_limits(train, "train.")
    train = replace(train, batch_ramp=checked_ramp(train))
    if train.tokens is None:
        steps = train.steps if train.epochs is None else DEFAULT_STEPS
    elif train.epochs is not None:
        raise ConfigError(f"train.epochs={train.epochs}: train.tokens={train.tokens} sets the length; set only one")
    elif trains_on_images(config):
        raise ConfigError(
            f"train.tokens={train.tokens}: model={config.model.name} is trained on images; use train.epochs or "
            "train.steps"
        )
    else:
        steps = steps_for(train, _samples_of_tokens(train))
    if train.steps not in (steps, default, DEFAULT_STEPS):
        key = "tokens" if train.epochs is None else "epochs"
        raise ConfigError(f"train.steps={train.steps}: train.{key}={getattr(train, key)} sets the length; set only one")
    return replace(config, train=replace(train, steps=steps))


def with_epochs(config: Config, samples: int) -> Config:
    """Return the configuration with the number of steps of ``train.epochs``, if that is set.

    ``samples`` is the number of samples of an epoch.
    """
    train = config.train
    if train.epochs is None:
        return config
    return replace(config, train=replace(train, steps=steps_for(train, train.epochs * samples)))


def samples_of_run(train: TrainConfig) -> int:
    """Return the length of a run in samples. With ``train.tokens``, it does not depend on the batch sizes."""
    return samples_of(train, train.steps) if train.tokens is None else _samples_of_tokens(train)


def _samples_of_tokens(train: TrainConfig) -> int:
    assert train.tokens is not None
    return math.ceil(train.tokens / max(1, train.seq_len))


def length_key(train: TrainConfig) -> str:
    """Return the key that sets the length of a run."""
    return "train.tokens" if train.tokens is not None else "train.epochs" if train.epochs is not None else "train.steps"


def batch_size_at(train: TrainConfig, samples: int) -> int:
    """Return the size of the batch that begins with sample ``samples``."""
    return [size for first, size in _ramp(train) if first <= samples][-1]


def batch_sizes(train: TrainConfig) -> list[int]:
    """Return all batch sizes of a run in ascending order. The last one is ``train.batch_size``."""
    return [size for _, size in _ramp(train)]


def steps_for(train: TrainConfig, samples: float) -> int:
    """Return the minimum number of steps that read at least ``samples`` samples."""
    return sum(math.ceil((min(end, samples) - first) / size) for first, end, size in _phases(train) if first < samples)


def samples_of(train: TrainConfig, steps: int) -> int:
    """Return the number of samples that the first ``steps`` steps read."""
    samples = 0
    for first, end, size in _phases(train):
        taken = min(steps, math.ceil((end - first) / size)) if end < math.inf else steps
        steps, samples = steps - taken, samples + taken * size
    return samples


def checked_ramp(train: TrainConfig) -> list[list[int]] | None:
    """Return ``train.batch_ramp`` with integers.

    Raises ConfigError unless its sizes increase to ``train.batch_size``.
    """
    if train.batch_ramp is None:
        return None
    setting = f"train.batch_ramp={ramp_text(train)}"
    if not _is_ramp(train.batch_ramp):
        raise ConfigError(
            f"{setting}: not a list of first samples and batch sizes; use [[0,64],[1000000,128]], for example"
        )
    ramp = [[int(first), int(size)] for first, size in train.batch_ramp]
    if ramp[0][0] != 0:
        raise ConfigError(f"{setting}: the first batch begins with sample {ramp[0][0]}; begin with [0,{ramp[0][1]}]")
    for (first, size), (later, larger) in pairwise(ramp):
        if later <= first or larger <= size:
            raise ConfigError(
                f"{setting}: [{later},{larger}] follows [{first},{size}]; use increasing samples and increasing sizes"
            )
    if ramp[-1][1] != train.batch_size:
        raise ConfigError(
            f"{setting}: ends with {ramp[-1][1]} samples, and train.batch_size={train.batch_size}; set "
            f"train.batch_size={ramp[-1][1]}"
        )
    return ramp


def ramp_text(train: TrainConfig) -> str:
    """Return ``train.batch_ramp`` as it is written on a command line."""
    return str(train.batch_ramp).replace(" ", "")


def _is_ramp(value: Any) -> bool:
    pairs = isinstance(value, list) and value and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return bool(pairs) and all(
        type(number) in (int, float) and number >= least and float(number).is_integer()
        for pair in value
        for number, least in zip(pair, (0, 1), strict=True)
    )


def _ramp(train: TrainConfig) -> list[tuple[int, int]]:
    """Return the first sample of each batch size, and the size."""
    return [(first, size) for first, size in train.batch_ramp or [(0, train.batch_size)]]


def _phases(train: TrainConfig) -> Iterator[tuple[int, float, int]]:
    """Yield the first sample, the end and the batch size of consecutive steps of equal batch sizes.

    The last step of a phase may read past its end. The next phase then begins later, or is skipped.
    """
    position = 0
    for (_, size), (end, _) in pairwise([*_ramp(train), (math.inf, 0)]):
        if position < end:
            yield position, end, size
            if end < math.inf:
                position += math.ceil((end - position) / size) * size
