"""The interface of a check on a GPU: where it is, how long it may take, what it receives and returns."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """A check. ``target`` is ``module:function``, a function from ``CheckContext`` to ``Outcome``."""

    number: int
    name: str
    limit_s: float
    target: str


@dataclass(frozen=True)
class CheckContext:
    """Input of a check.

    Attributes:
        device_type: ``cuda``, or ``cpu`` for a rehearsal: tiny sizes, and no judgement of speed or of CUDA's behavior.
        directory: temporary directory of this check alone.
        earlier: values of the checks that have run before, by number.
    """

    device_type: str
    directory: Path
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def rehearsal(self) -> bool:
        return self.device_type == "cpu"


@dataclass
class Outcome:
    """Result of a check: a short text of its main figures, all values (for JSON), and what is wrong."""

    figure: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

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
    """The check cannot run on this machine. The message says why and what is needed."""
