"""Checks of values that are no settings, and lists of possible values for messages."""

import math
from pathlib import Path
from typing import Any

from gpt4d.config.fields import LARGEST, ConfigError, Limits


def check_at_least(key: str, value: float | None, least: float, most: float = LARGEST) -> None:
    """Raise ConfigError unless ``value`` is None, or from ``least`` to ``most``."""
    Limits(at_least=least, at_most=most).check(key, value)


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    Limits(choices=choices).check(key, value)


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def check_picture(key: str, path: str | None) -> None:
    """Raise ConfigError unless ``path`` is None or empty, or a picture can be written to it."""
    if path and Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{key}={path}: no format for pictures; use the name of a .png, .pdf or .svg file")
    if path and Path(path).is_dir():
        raise ConfigError(f"{key}={path}: this is a directory; use the name of a file")
    if path and not Path(path).parent.is_dir():
        raise ConfigError(f"{key}={path}: no directory {Path(path).parent}; create it or use another")


def shortened(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:11], "…"]
    return ", ".join(map(str, shown))
