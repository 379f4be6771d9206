"""Streams, events and threads of a simulated GPU: vector clocks, which tell whether one operation follows another.

The GPU is arbitrarily slow. An operation is complete only for streams that have waited for it, and for threads of the
host that have synchronized with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from tests.simulated_gpu.graphs import Graph
    from tests.simulated_gpu.job import Job

Clock = dict[int, int]  # number of operations that are complete, by stream
_OTHER_GPU = 1  # the current GPU of a new thread: another rank's, as GPU 0 is for most ranks


def merge(clock: Clock, other: Clock) -> None:
    """Add the operations of ``other`` to ``clock``."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def covers(clock: Clock, other: Clock) -> bool:
    """Return whether all operations of ``other`` are complete at ``clock``."""
    return all(clock.get(stream, 0) >= count for stream, count in other.items())


class Stream(torch.Stream):
    """A queue of operations of a job, in place of torch.cuda.Stream."""

    def __new__(cls, job: Job, name: str):
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return super().__new__(cls, stream_id=len(job.streams), device_index=0, device_type=kind)

    def __init__(self, job: Job, name: str):
        self.job, self.name, self.number = job, name, len(job.streams)
        self.clock: Clock = {}  # the operations that are complete when the stream's next operation starts
        job.streams.append(self)

    @property
    def length(self) -> int:
        """Number of operations that were added to the queue."""
        return self.clock.get(self.number, 0)

    def start_operation(self) -> int:
        """Add an operation to the queue and return its number."""
        merge(self.clock, self.job.thread.clock)
        self.clock[self.number] = self.length + 1
        return self.length

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            self.job.graphs.note_wait(self, event.graph)
        self.job.check_thread("makes a stream wait")
        merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.job.graphs.note_wait_for_stream(self, stream)
        self.job.check_thread("makes a stream wait")
        merge(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.job)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.job.host_waits("it synchronizes with a stream", self.clock)

    def query(self) -> bool:
        self.job.check_thread("queries a stream")
        return covers(self.job.thread.clock, self.clock)


class Event:
    """A point in a stream, in place of torch.cuda.Event. Times have no meaning. ``graph``: its capture, if any."""

    def __init__(self, job: Job, enable_timing: bool = False, **_):
        self.job, self.timed, self.recorded = job, enable_timing, False
        self.clock: Clock = {}
        self.graph: Graph | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.job.check_thread("records an event")
        stream = stream or self.job.current_stream()
        merge(stream.clock, self.job.thread.clock)
        self.clock, self.recorded, self.graph = dict(stream.clock), True, self.job.graphs.captured_by(stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.job.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.job.graphs.check_host("queries an event")
        if self.graph:
            self.job.problems.report("graph", "the host queries an event of a graph")
        self.job.check_thread("queries an event")
        return covers(self.job.thread.clock, self.clock)

    def synchronize(self) -> None:
        self.job.host_waits("it synchronizes with an event", self.clock)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not (event.timed and event.recorded):
                self.job.problems.report("timing", "an event without a time")
            elif not covers(self.job.thread.clock, event.clock):
                self.job.problems.report("timing", "the time of an event that the host has not waited for")
        return 1.0


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
