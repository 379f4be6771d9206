"""A collective in flight, and the operations of an all-reduce. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

SUM, MAX = "sum", "max"  # operations of an all-reduce


class InFlight(Protocol):
    """A communication in flight."""

    def wait(self) -> object: ...


class Pending:
    """A collective in flight. ``wait`` returns its result, the same at each call."""

    __slots__ = ("finish", "result", "run", "source")

    def __init__(
        self,
        result: Any,
        run: InFlight | None = None,
        finish: Callable[[Any], Any] | None = None,
        source: Any | None = None,
    ):
        self.result, self.run, self.finish = result, run, finish
        self.source = source  # sent data must stay in memory until then

    def wait(self) -> Any:
        if self.run is not None:
            self.run.wait()
            if self.finish is not None:
                self.result = self.finish(self.result)
            self.run = self.finish = self.source = None
        return self.result

    def then(self, change: Callable[[Any], Any]) -> Pending:
        """Return the same collective with ``change`` applied to its result."""
        if self.run is None:
            return Pending(change(self.result))
        finish = self.finish or (lambda result: result)
        return Pending(self.result, self.run, lambda result: change(finish(result)), self.source)
