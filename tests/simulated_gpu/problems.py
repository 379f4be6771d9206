"""The problems that a simulated GPU finds, with the line of gpt4d that caused them."""

import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = f"{_REPOSITORY}/gpt4d/", f"{_REPOSITORY}/tests/"
_SIMULATION = {str(path) for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")}


class Site(NamedTuple):
    """A line of gpt4d, or of a test, that uses the GPU."""

    file: str = "torch"
    function: str = "autograd, without a line of gpt4d"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def call_site() -> Site:
    """Return the innermost line of the calling thread that is neither torch's nor the simulation's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_SOURCES) and code.co_filename not in _SIMULATION:
            return Site(code.co_filename.removeprefix(f"{_REPOSITORY}/"), code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Site()


class Problems:
    """The problems of a simulated job, without repetitions.

    Operations continue after a problem: an exception in another thread, or in autograd's, is easily lost.
    """

    def __init__(self, host_waits: Collection[tuple[str, str]] = (), first_waits: Collection[tuple[str, str]] = ()):
        """Create an empty list.

        ``host_waits``: the functions in which the host may wait for the GPU, as (file, qualified name).
        ``first_waits``: the functions in which it may wait until ``steady`` is set, such as functions with a cache.
        """
        self.host_waits, self.first_waits = host_waits, first_waits
        self.steady = False
        self._found: dict[tuple[str, Site], str] = {}

    def __iter__(self):
        return iter(self._found.values())

    def report(self, rule: str, text: str) -> None:
        """Add a problem of the calling line. ``rule`` distinguishes the problems of a line."""
        site = call_site()
        self._found.setdefault((rule, site), f"{site}: {text}")

    def report_wait(self, reason: str) -> None:
        """Add a wait of the host for the GPU, unless the calling function may wait."""
        site = call_site()
        allowed = self.host_waits if self.steady else {*self.host_waits, *self.first_waits}
        if (site.file, site.function) not in allowed:
            self.report("host", f"the host waits for the GPU: {reason}")
