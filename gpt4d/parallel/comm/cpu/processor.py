"""The processor of a rank on a CPU: its clock, its threads and its copies for communication.

A benchmark may replace ``current`` by a processor that keeps the time of a device that it simulates.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Processor:
    """The real processor: nothing here takes time of its own."""

    def now(self) -> float:
        """Return the seconds of the clock that the intervals of gpt4d.parallel.comm.stats are measured with."""
        return time.perf_counter()

    def on_thread(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function that a communication thread executes in place of ``function``."""
        return function

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a task of another thread."""
        yield

    @contextmanager
    def posting(self) -> Iterator[float | None]:
        """Copy a tensor to the host's shared memory. Yield the time at which that starts, if it counts."""
        yield None

    @contextmanager
    def receiving(self, collective: Any) -> Iterator[None]:
        """Wait for the host's ranks and set ``collective.result``, a combination of their tensors.

        ``collective``: a gpt4d.parallel.comm.cpu.shared_memory.SharedMemoryCollective.
        """
        yield


current = Processor()
