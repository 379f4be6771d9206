"""A check on a GPU: a test with the marker ``gpu`` that runs in a process of its own and reports values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Check:
    """Input and result of a check.

    Attributes:
        device_type: ``cuda``, or ``cpu`` for a rehearsal: tiny sizes, without a verdict on speed or on CUDA's behavior.
        directory: temporary directory of this check alone.
        earlier: values of the checks that have run before, by number.
        figure: a short text of the main figures.
        values: all values, for JSON.
        problems: reasons why the check fails.
        missing: property that the machine lacks for the check; then the check neither passes nor fails.
    """

    device_type: str
    directory: Path
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)
    figure: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def rehearsal(self) -> bool:
        return self.device_type == "cpu"

    def require(self, condition: bool, problem: str) -> None:
        """Add ``problem`` unless ``condition`` holds."""
        if not condition:
            self.problems.append(problem)


def largest_difference(actual: Iterable[float | None], expected: Iterable[float | None]) -> float:
    """Return the largest relative difference; infinity if a value is not finite, which JSON stores as None."""
    differences = [
        math.nan if a is None or b is None else abs(a / b - 1) for a, b in zip(actual, expected, strict=True)
    ]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


class Unavailable(Exception):
    """The check cannot run until somebody provides a requirement, which the message names. The check fails."""


class NotPossible(Exception):
    """The machine lacks a property, which the message names, for this check. The check neither passes nor fails."""
