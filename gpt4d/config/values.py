"""Checks of values outside the configuration, and lists of possible values for messages."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt4d.config.fields import LARGEST, Limits
from gpt4d.runtime.errors import ConfigError


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
