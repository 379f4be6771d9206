"""A check on a GPU: a test with the marker ``gpu`` that runs in a process of its own and reports values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Check:
    """Input and result of a check. A rehearsal has tiny sizes, and no verdict on speed or on CUDA's behavior."""

    device_type: str  # cuda, or cpu for a rehearsal
    directory: Path  # temporary directory of this check alone
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)  # values of the checks that have run, by number
    figure: str = ""  # a short text of the main figures
    values: dict[str, Any] = field(default_factory=dict)  # all values, for JSON
    problems: list[str] = field(default_factory=list)  # reasons why the check fails
    missing: str = ""  # property that the machine lacks for the check, which then neither passes nor fails

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
    pairs = zip(actual, expected, strict=True)
    differences = [math.nan if None in pair else abs(pair[0] / pair[1] - 1) for pair in pairs]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


class Unavailable(Exception):
    """The check cannot run until somebody provides a requirement, which the message names. The check fails."""


class NotPossible(Exception):
    """The machine lacks a property, which the message names, for this check. The check neither passes nor fails."""
