"""Threads of a simulated job: their current GPU and stream, and the operations they have synchronized with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from tests.simulated_gpu.streams import Clock, Stream, merge

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job

_OTHER_GPU = 1  # the current GPU of a new thread: another rank's, as GPU 0 is for most ranks


class ThreadState:
    """The state of CUDA in the thread that creates it."""

    def __init__(self, stream: Stream):
        self.gpu, self.stream = _OTHER_GPU, stream  # index of the current GPU, and the current stream
        self.clock: Clock = {}  # the operations that have ended for the thread
        # New tensors of Python's numbers are copied from the host, which can be observed.
        torch._C._set_only_lift_cpu_tensors(True)


def is_of_autograd() -> bool:
    """Return whether the calling thread is not Python's."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def observed_threads(job: Job) -> Iterator[None]:
    """Observe the threads that start inside the context.

    A thread that receives the result of a future has synchronized with all operations that the future's thread has
    synchronized with.
    """

    def completes(method: Callable) -> Callable:
        @wraps(method)
        def call(future, value):
            future.simulated_clock = dict(job.thread.clock)
            return method(future, value)

        return call

    def receives(method: Callable) -> Callable:
        @wraps(method)
        def call(future, timeout=None):
            try:
                return method(future, timeout)
            finally:
                merge(job.thread.clock, getattr(future, "simulated_clock", {}))

        return call

    run = threading.Thread.run

    def run_observed(thread) -> None:
        with job.observed():
            run(thread)

    with ExitStack() as stack:
        stack.enter_context(patch.object(threading.Thread, "run", run_observed))
        for change, names in ((completes, ("set_result", "set_exception")), (receives, ("result", "exception"))):
            for name in names:
                stack.enter_context(patch.object(Future, name, change(getattr(Future, name))))
        yield
