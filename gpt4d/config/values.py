"""Checks of single values, and lists of possible ones for messages."""

import math
from pathlib import Path
from typing import Any

from gpt4d.config.schema import ConfigError

LARGEST = 1e12  # limit of numbers without a limit of their own, so that none is infinite
LARGEST_SIZE = 10_000_000  # limit of sizes of a model
LARGEST_DEVICES = 1_000_000  # limit of devices to plan for
LARGEST_COUNT = 10_000  # limit of layers and other things that are enumerated


def check_share(key: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value}: not a share; use 0 to 1")


def check_above_0(key: str, value: float | None, most: float = LARGEST) -> None:
    """Raise ConfigError unless ``value`` is None, or above 0 and at most ``most``."""
    if value is not None and not value > 0:
        raise ConfigError(f"{key}={value}: use a value above 0")
    check_at_most(key, value, most)


def check_at_least(key: str, value: float | None, least: float, most: float = LARGEST) -> None:
    """Raise ConfigError unless ``value`` is None, or from ``least`` to ``most``."""
    if value is not None and not value >= least:
        raise ConfigError(f"{key}={value}: use a value of at least {least}")
    check_at_most(key, value, most)


def check_at_most(key: str, value: float | None, most: float = LARGEST) -> None:
    if value is not None and not value <= most:
        raise ConfigError(f"{key}={value}: use a value of at most {most:,.0f}")


def check_fraction(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{key}={value}: use a value from 0 up to, not including, 1")


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: use one of {', '.join(choices)}")


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
