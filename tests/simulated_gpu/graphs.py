"""CUDA graphs of a simulated GPU: captures of streams, launches, and the memory pool of graphs.

A capture executes operations as the simulation does without one, so that it finds races inside a graph. A launch is one
operation that uses all memory of the graph. tests.support.graph_replay compares numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from tests.simulated_gpu.job import Job
from tests.simulated_gpu.memory import Block, Memory
from tests.simulated_gpu.streams import Event, Stream, covers


class Graph:
    """A capture of a job, in place of torch.cuda.CUDAGraph."""

    def __init__(self, graphs: Graphs):
        self.graphs, self.job = graphs, graphs.job
        self.streams: list[Stream] = []  # the stream of the capture, and streams that have waited for it
        self.reads: dict[int, Block] = {}
        self.writes: dict[int, Block] = {}

    def capture_begin(self, pool: object, capture_error_mode: str = "global") -> None:
        report = self.job.problems.report
        if capture_error_mode != "thread_local":
            report("graph", "a capture forbids other threads to allocate memory")
        if self.graphs.current is not None:
            report("graph", "a capture begins during another")
        if self.job.current_stream() is self.job.streams[0]:
            report("graph", "a capture of the default stream")
        self.graphs.current, self.graphs.thread = self, threading.get_ident()
        self.streams.append(self.job.current_stream())

    def capture_end(self) -> None:
        origin, *joined = self.streams
        for stream in joined:
            if not covers(origin.clock, stream.clock):
                self.job.problems.report("graph", f"the capture ends before the {stream.name} that it has started")
        self.graphs.current = None
        self.streams.clear()

    def replay(self) -> None:
        memory = self.job.memory
        if self.graphs.current is not None:
            self.job.problems.report("graph", "a launch during a capture")
        alive = {id(block) for block in memory._blocks.values()}
        for block in (self.reads | self.writes).values():
            if id(block) not in alive and id(block) not in self.graphs.pool:
                self.job.problems.report("graph", f"a graph uses memory of {block.allocated} that was freed")
        self.graphs.launches += 1
        self.graphs.launch(list(self.reads.values()), list(self.writes.values()))


class Graphs:
    """The graphs of a job.

    Attributes:
        current: the graph that is captured now.
        thread: the thread that captures.
        pool: blocks of the graphs' pool, by id.
        launches: number of launched graphs.
    """

    def __init__(self, job: Job):
        self.job = job
        self.current: Graph | None = None
        self.thread = 0
        self.pool: dict[int, Block] = {}
        self.launches = 0
        self._launching = False

    def captures(self, stream: Stream) -> bool:
        return self.current is not None and stream in self.current.streams

    def launch(self, reads: list[Block], writes: list[Block]) -> None:
        self._launching = True
        self.job.memory.use("a graph", self.job.current_stream(), reads, writes)
        self._launching = False

    def note_use(self, operation: str, stream: Stream, reads: list[Block], writes: list[Block]) -> None:
        """Note the memory that an operation uses."""
        if self.captures(stream):
            assert self.current is not None
            self.current.reads |= {id(block): block for block in reads}
            self.current.writes |= {id(block): block for block in writes}
        elif self._launching or stream is self.job.streams[0]:
            return
        elif any(id(block) in self.pool for block in (*reads, *writes)):
            self.job.problems.report("graph", f"{operation} on the {stream.name} uses memory of a graph")

    def note_wait(self, stream: Stream, captured: Graph | None) -> None:
        """Note that a stream waits for work of a graph, or for work outside graphs."""
        if captured is not None and captured is self.current:
            if stream not in captured.streams:
                captured.streams.append(stream)
        elif self.captures(stream):
            self.job.problems.report("graph", f"the {stream.name} waits for work outside the graph")
        elif captured is not None:
            self.job.problems.report("graph", f"the {stream.name} waits for an event of a graph")

    def check_host(self, action: str) -> None:
        if self.current is not None and threading.get_ident() == self.thread:
            self.job.problems.report("graph", f"the host {action} during a capture")


@contextmanager
def simulated_graphs(job: Job) -> Iterator[Graphs]:
    """Simulate torch.cuda.CUDAGraph in a job."""
    graphs, captured = Graphs(job), dict[int, Graph]()  # graphs of captured events, by id
    events: list[Event] = []  # they keep their ids
    use, add_new, record = Memory.use, Memory.add_new, Event.record
    wait_event, wait_stream, host_waits, query = Stream.wait_event, Stream.wait_stream, Job.host_waits, Event.query

    def use_and_note(memory, operation, stream, reads, writes):
        graphs.note_use(operation, stream, reads, writes)
        use(memory, operation, stream, reads, writes)

    def add_to_pool(memory, tensor, operation):
        block = add_new(memory, tensor, operation)
        if block is not None and graphs.captures(job.current_stream()):
            graphs.pool[id(block)] = block
        return block

    def record_and_note(event, stream=None):
        record(event, stream)
        captured.pop(id(event), None)
        if graphs.captures(stream or job.current_stream()):
            assert graphs.current is not None
            captured[id(event)] = graphs.current
            events.append(event)

    def wait_for_event(stream, event):
        if event.recorded:
            graphs.note_wait(stream, captured.get(id(event)))
        wait_event(stream, event)

    def wait_for_stream(stream, other):
        if graphs.captures(stream) or graphs.captures(other):
            graphs.note_wait(stream, graphs.current if graphs.captures(other) else None)
        wait_stream(stream, other)

    def wait_on_host(job, reason, clock):
        graphs.check_host("waits")
        host_waits(job, reason, clock)

    def query_event(event):
        graphs.check_host("queries an event")
        if id(event) in captured:
            job.problems.report("graph", "the host queries an event of a graph")
        return query(event)

    replaced = [
        (Memory, {"use": use_and_note, "add_new": add_to_pool}),
        (Event, {"record": record_and_note, "query": query_event}),
        (Stream, {"wait_event": wait_for_event, "wait_stream": wait_for_stream}),
        (Job, {"host_waits": wait_on_host}),
        (
            torch.cuda,
            {"CUDAGraph": lambda: Graph(graphs), "graph_pool_handle": object, "empty_cache": lambda: None},
        ),
    ]
    with ExitStack() as stack:
        for place, methods in replaced:
            stack.enter_context(patch.multiple(place, **methods))
        yield graphs
