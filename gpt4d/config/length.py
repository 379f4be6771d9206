"""The length of a run in steps: ``train.steps``, or the equivalent of ``train.tokens`` or ``train.epochs``."""

import math
from dataclasses import replace

from gpt4d.config.batch_ramp import checked_ramp, samples_of, steps_for
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
