"""The effect of each setting on results, which decides whether a start continues the experiment of a run directory.

Every key has one ``Effect`` on the numbers that a run produces. A run directory belongs to one experiment: a start that
changes a key with ``Effect.RESULTS`` is refused, unless ``checkpoint.allow_changes`` lists the key.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpt4d.config.fields import Effect
from gpt4d.config.keys import known_keys, stated
from gpt4d.runtime.errors import ConfigError


class Change(NamedTuple):
    """Values of one key before and after."""

    before: Any
    after: Any


def effect_of(key: str) -> Effect:
    """Return the effect of a key, which its field or a field of its groups states. Raises KeyError if none does."""
    effects = stated(key, "effect")
    if not effects:
        raise KeyError(key)
    return effects[-1]


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
