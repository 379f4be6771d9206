"""Fields of settings: default, meaning, limits, other names, condition and effect of a key stand beside its name.

Checks of values outside the configuration, and texts of values for messages.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gpt4d.runtime.errors import ConfigError

LARGEST = 1e12  # default upper limit, so that no number is infinite
LARGEST_SIZE = 10_000_000  # limit of sizes of a model
LARGEST_COUNT = 10_000  # limit of layers and other things that are enumerated
COUNT: dict[str, Any] = {"at_least": 1, "at_most": LARGEST_COUNT}  # arguments of setting()
SIZE: dict[str, Any] = {"at_least": 1, "at_most": LARGEST_SIZE}
FRACTION: dict[str, Any] = {"at_least": 0, "below": 1}


class Effect(Enum):
    """Effect of a changed key on a run."""

    RESULTS = "the results"
    DATA = "the data, which are compared by their content instead (Task.identity)"
    LENGTH = "the number of steps, and with it the learning rates of a schedule that ends with the run"
    ROUNDING = "the order of additions: results are equal up to rounding"
    NONE = "no number"


# Returns None if the run of a Config reads a setting, otherwise "reason; remedy".
Condition = Callable[[Any], str | None]


@dataclass(frozen=True)
class Limits:
    """Values that a setting accepts. None is always accepted: the type of the field decides about it."""

    at_least: float | None = None
    at_most: float = math.inf
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError unless the limits contain ``value``. NaN is outside every limit."""
        remedy = None
        if value is None:
            return
        if self.choices and value not in self.choices:
            remedy = str(self)
        elif self.at_least is not None and not value >= self.at_least:
            remedy = f"a value of at least {self.at_least}"
        elif self.above is not None and not value > self.above:
            remedy = f"a value above {self.above}"
        elif self.below is not None and not value < self.below:
            remedy = f"a value below {self.below}"
        elif self.at_most < math.inf and not value <= self.at_most:
            remedy = f"a value of at most {self.at_most:,.0f}"
        if remedy:
            raise ConfigError(f"{key}={value}: use {remedy}")

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        bounds = [("at least", self.at_least), ("above", self.above), ("below", self.below)]
        texts = [f"{name} {bound}" for name, bound in bounds if bound is not None]
        return ", ".join(texts + [f"at most {self.at_most:,.0f}"] * (self.at_most < LARGEST))


def setting(
    default: Any,
    meaning: str,
    *,
    aliases: str = "",
    read_if: Condition | tuple[Condition, ...] | None = None,
    off: Any = None,
    effect: Effect | None = None,
    **limits: Any,
) -> Any:
    """Return a field of a dataclass of settings, whose metadata contain the arguments.

    Args:
        default: a value, or a class to instantiate.
        meaning: explanation of the key.
        aliases: names that other trainers give to the key. Only the part after the last dot of a typed name counts.
        read_if: conditions under which a run reads the key (``gpt4d.config.conditions``); a group's hold for its keys.
        off: value that disables a feature, which is accepted even where the feature does not exist.
        effect: effect of the key, or of the keys of a group, unless a key states its own.
        limits: fields of ``Limits``. The items of a list have the limits. A number with a lower limit is at most
            ``LARGEST``.
    """
    if limits.keys() & {"at_least", "above"}:
        limits = {"at_most": LARGEST} | limits
    metadata = {"meaning": meaning, "limits": Limits(**limits), "aliases": aliases, "off": off, "effect": effect}
    metadata["read_if"] = read_if if isinstance(read_if, tuple | None) else (read_if,)
    if isinstance(default, list):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(metadata=metadata, **({"default_factory" if isinstance(default, type) else "default": default}))


def derived(default: Any) -> Any:
    """Return a field of a dataclass of settings that is no key: other settings determine it."""
    return field(default=default, kw_only=True, metadata={"derived": True})


def redefined(schema: type, name: str, default: Any) -> Any:
    """Return the field ``name`` of a base class with another default."""
    (base,) = [each for each in fields(schema) if each.name == name]
    return field(default=default, metadata=base.metadata)


def check_limits(settings: Any, prefix: str = "") -> None:
    """Check every value in a dataclass, and in the dataclasses inside it, against the limits of its field.

    Raises ConfigError for the first value outside them. ``prefix``: group of the keys, such as ``model.``.
    """
    for each in fields(settings):
        if each.metadata.get("derived"):  # the keys that it derives from are checked
            continue
        _check(f"{prefix}{each.name}", getattr(settings, each.name), each.metadata.get("limits", Limits()))


def _check(key: str, value: Any, limits: Limits) -> None:
    if is_dataclass(value):
        check_limits(value, f"{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(f"{key}[{index}]", item, limits)
    else:
        limits.check(key, value)


def check_at_least(key: str, value: float | None, least: float, most: float = LARGEST) -> None:
    """Raise ConfigError unless ``value`` is between ``least`` and ``most``. None is accepted."""
    Limits(at_least=least, at_most=most).check(key, value)


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, which lists ``choices``, unless ``value`` is among them."""
    Limits(choices=choices).check(key, value)


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key, such as ``parallel.overlap.data``."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def command_text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of a command line."""
    return [f"{key}={command_text(value)}" for key, value in settings.items()]


def flattened(values: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by their joined keys: ``{"a.b": 1}`` for ``{"a": {"b": 1}}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flattened(value, separator, key + separator) if isinstance(value, dict) else {key: value}
    return flat


def divisors(n: int) -> list[int]:
    """Return all divisors of ``n`` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def check_image_format(key: str, path: str | None) -> None:
    """Raise ConfigError if no plot can be written to ``path``. None and an empty path are accepted."""
    if path and Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{key}={path}: not a format of plots; use the name of a .png, .pdf or .svg file")
    if path and Path(path).is_dir():
        raise ConfigError(f"{key}={path}: this is a directory; use the name of a file")
    if path and not Path(path).parent.is_dir():
        raise ConfigError(f"{key}={path}: no directory {Path(path).parent}; create it or use another")


def shortened(values: list[int]) -> str:
    """Return ``values`` separated by commas; a list of more than 12 is cut after 11."""
    shown = values if len(values) <= 12 else [*values[:11], "…"]
    return ", ".join(map(str, shown))
