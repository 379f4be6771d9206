"""The effect of each setting on results, which decides whether a start continues the experiment of a run directory.

Every key has one ``Effect`` on the numbers that a run produces. A run directory belongs to one experiment: a start that
changes a key with ``Effect.RESULTS`` is refused, unless ``checkpoint.allow_changes`` lists the key.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, NamedTuple

from gpt4d.config.fields import ConfigError
from gpt4d.config.keys import known_keys


class Effect(Enum):
    """Effect of a changed key on a run."""

    RESULTS = "the results"
    DATA = "the data, which are compared by their content instead (Task.identity)"
    LENGTH = "the number of steps, and with it the learning rates of a schedule that ends with the run"
    ROUNDING = "the order of additions: results are equal up to rounding"
    NONE = "no number"


# The longest entry that is a key or one of its groups decides.
_EFFECTS = {
    "model": Effect.RESULTS,
    "model.name": Effect.NONE,
    "model.imbalance": Effect.NONE,
    "model.vocab_multiple": Effect.ROUNDING,
    "data": Effect.DATA,
    "data.name": Effect.NONE,
    "data.shuffle": Effect.RESULTS,
    "data.stream": Effect.RESULTS,
    "data.flip": Effect.RESULTS,
    "data.reset_attention": Effect.RESULTS,
    "data.skip_long": Effect.NONE,  # the remaining conversations do not depend on it
    "data.validation": Effect.NONE,
    "data.retry_s": Effect.NONE,
    "data.processes": Effect.NONE,
    "data.workers": Effect.NONE,
    "data.cache_dir": Effect.NONE,
    "parallel": Effect.ROUNDING,
    "parallel.timeout_s": Effect.NONE,
    "train": Effect.RESULTS,
    "train.steps": Effect.LENGTH,
    "train.tokens": Effect.LENGTH,
    "train.epochs": Effect.LENGTH,
    "train.micro_batch_size": Effect.ROUNDING,
    "train.activation_checkpointing": Effect.ROUNDING,
    "train.loss_chunks": Effect.ROUNDING,
    "train.compile": Effect.ROUNDING,
    "train.cuda_graphs": Effect.NONE,
    "train.deterministic": Effect.ROUNDING,
    "train.max_skipped": Effect.NONE,
    "train.validate_every": Effect.NONE,
    "train.validation_batches": Effect.NONE,
    "optim": Effect.RESULTS,
    "optim.shard_states": Effect.ROUNDING,
    "optim.validate_averages": Effect.NONE,
    "lora": Effect.RESULTS,
    "cluster": Effect.ROUNDING,  # the planner's choices depend on it
    "evaluate": Effect.NONE,
    "checkpoint": Effect.NONE,
    "checkpoint.init": Effect.RESULTS,
    "logging": Effect.NONE,
    "profile": Effect.NONE,
    "run": Effect.NONE,
}


class Change(NamedTuple):
    """Values of one key before and after."""

    before: Any
    after: Any


def effect_of(key: str) -> Effect:
    """Return the effect of a key. Raises KeyError for a key that is not in the table."""
    entry = key
    while entry not in _EFFECTS:
        entry, dot, _ = entry.rpartition(".")
        if not dot:
            raise KeyError(key)
    return _EFFECTS[entry]


def recorded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide a run's results and length, by key. Checkpoints store these settings.

    ``values`` is a configuration as nested dictionaries, such as ``asdict(config)`` or the content of a config.yaml.
    """
    found = {}
    for key in known_keys():
        if effect_of(key) in (Effect.RESULTS, Effect.LENGTH):
            value: Any = values
            for name in key.split("."):
                value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                found[key] = value
    return found


_ABSENT = object()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Change]:
    """Return the keys of two ``recorded_settings`` whose values differ. Only keys in both settings are compared."""
    return {key: Change(before[key], after[key]) for key in before if key in after and before[key] != after[key]}


def check_changes(found: Mapping[str, Change], allowed: Collection[str], run: str) -> None:
    """Raise ConfigError if a change alters results and neither its key nor its group is allowed.

    ``run``: the checkpoint or run directory that has the values before the changes.
    """
    refused = [key for key in found if effect_of(key) is Effect.RESULTS and not is_allowed(key, allowed)]
    if refused:
        first, *others = refused
        also = "".join(f", {key}={found[key].after} instead of {found[key].before}" for key in others)
        raise ConfigError(
            f"{first}={found[first].after}: {run} has {found[first].before}{also}; restore the old value"
            f"{'s' if others else ''}, set another run.name, or add checkpoint.allow_changes=[{','.join(refused)}]"
        )


def is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Return whether ``checkpoint.allow_changes`` lists a key or one of its groups."""
    return any(key == entry or key.startswith(f"{entry}.") for entry in allowed)


def check_allowed(allowed: Any) -> None:
    """Raise ConfigError unless ``checkpoint.allow_changes`` lists keys, or groups of keys, that change results."""
    possible = {key for key in known_keys() if effect_of(key) in (Effect.RESULTS, Effect.DATA)}
    groups = {key.rpartition(".")[0] for key in possible}
    for key in allowed:
        if key not in possible | groups:
            raise ConfigError(
                f"checkpoint.allow_changes=[{','.join(allowed)}]: {key} is not a setting that changes results; list "
                "keys such as optim.lr, or groups such as optim or data"
            )
