"""Fields of settings: default, meaning, limits, other names, condition and effect of a key stand beside its name."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
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
