"""CUDA graphs of a simulated GPU: captures of streams, launches, and the memory pool of graphs.

A capture executes operations as the simulation does without one, so that it finds races inside a graph. A launch is one
operation that uses all memory of the graph. tests.support.graph_replay compares numbers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.simulated_gpu.streams import Stream, covers

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job
    from tests.simulated_gpu.memory import Block


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
    """The graphs of a job."""

    def __init__(self, job: Job):
        self.job = job
        self.current: Graph | None = None  # the graph that is captured now
        self.thread = 0  # the thread that captures
        self.pool: dict[int, Block] = {}  # blocks of the graphs' pool, by id
        self.launches = 0  # number of launched graphs
        self._launching = False

    def captures(self, stream: Stream) -> bool:
        return self.current is not None and stream in self.current.streams

    def captured_by(self, stream: Stream) -> Graph | None:
        """Return the graph that captures a stream now."""
        return self.current if self.captures(stream) else None

    def launch(self, reads: list[Block], writes: list[Block]) -> None:
        self._launching = True
        self.job.memory.use("a graph", self.job.current_stream(), reads, writes)
        self._launching = False

    def note_new(self, block: Block) -> None:
        """Note memory that an operation on the current stream allocates."""
        if self.captures(self.job.current_stream()):
            self.pool[id(block)] = block

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

    def note_wait_for_stream(self, stream: Stream, other: Stream) -> None:
        if self.captures(stream) or self.captures(other):
            self.note_wait(stream, self.captured_by(other))

    def check_host(self, action: str) -> None:
        if self.current is not None and threading.get_ident() == self.thread:
            self.job.problems.report("graph", f"the host {action} during a capture")
