"""The operations that a rank puts on its GPU's streams, recorded in a run without a GPU.

The code of the run decides about each operation. Its tensors are on torch's device ``meta``, which has no values, so
that every branch for GPUs is taken. Only torch's streams, events and process groups are replaced.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt4d.parallel.comm import transport
from gpt4d.parallel.comm.stats import CommStats
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.resharding.plan import MIN_CHUNK_BYTES
from gpt4d.plan import ParallelPlan
from gpt4d.step import TrainStep, build_stage, connect_stages
from tests.support.hardware_queues import COMPUTE, HIGH, NORMAL, Exchange, Meeting, Operation, Record, Stream, Wait
from tests.support.stages import RandomTokens

_META = torch.device("meta")
_CHUNK_BYTES = 2048  # even small tensors are sent in several rounds


def queued_operations(plan: ParallelPlan, rank: int) -> list[Operation]:
    """Return the operations of a rank in the order in which the host queues them: a step, an evaluation and a step."""
    with _recording(plan, rank) as recorder:
        own = plan.stage_of(rank)
        grid = Grid(own.sizes, "cuda", own.ranks)
        for axis in grid.active_axes.values():  # preflight checks use the axes in this order
            axis.all_reduce(_empty((1,), "float32"))
        stage = build_stage(plan, grid, _META)
        if len(plan.stages) > 1:
            connect_stages(plan, stage, ranks_per_host=2)
        batch = stage.module.spec.planned_batch(_empty, plan.micro_batch_size(own), plan.config.train.seq_len)
        batches = [batch] * plan.microbatches
        step = TrainStep(stage, RandomTokens.compute, plan.config.optim)
        step(batches, plan.microbatches, units=1, lr=1e-3)
        step.evaluate(batches, plan.microbatches)
        step(batches, plan.microbatches, units=1, lr=1e-3)
    awaited = {operation.event for operation in recorder.operations if isinstance(operation, Wait)}
    return [step for step in recorder.operations if not isinstance(step, Record) or step.event in awaited]


def _empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=_META)


class _Recorder:
    """The operations on a rank's streams."""

    def __init__(self, rank: int):
        self.rank, self.operations = rank, list[Operation]()
        self.collective = ""  # name of the last collective or transfer that the host has started
        self.communicators: dict[dist.ProcessGroup, tuple[str, _Stream]] = {}  # axis and stream
        self.counts: Counter[Any] = Counter()  # streams, events, and meetings by name
        self.current = self.compute = _Stream(self, COMPUTE)
        self._thread = threading.get_ident()

    def add(self, operation: Operation) -> None:
        assert threading.get_ident() == self._thread, "two threads queue operations, so their order is open"
        self.operations.append(operation)

    def next_number(self, name: Any) -> int:
        self.counts[name] += 1
        return self.counts[name] - 1

    @contextmanager
    def on_stream(self, stream: _Stream | None) -> Iterator[None]:
        """Replace torch.cuda.stream."""
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def collective_on(self, kind: str, *tensors: Any, group: dist.ProcessGroup, async_op: bool) -> _Work:
        """Replace a collective of torch.distributed."""
        assert async_op
        axis = self.collective.removeprefix(f"{kind} ")
        members = tuple(dist.get_process_group_ranks(group))
        if group not in self.communicators:
            self.communicators[group] = axis, _Stream(self, HIGH, f"NCCL {axis}")
        name = kind, self.communicators[group][0], members
        number = self.next_number(name)
        return _Work(self, group, f"{self.collective}, number {number}", [Meeting((*name, number), len(members))])

    def messages(self, ends: Sequence[dist.P2POp]) -> list[_Work]:
        """Replace torch.distributed.batch_isend_irecv."""
        group, meetings, peers = ends[0].group, [], []
        for end in ends:
            sends = end.op is dist.isend
            name = self.communicators[group][0], *((self.rank, end.peer) if sends else (end.peer, self.rank))
            meetings.append(Meeting((*name, end.tensor.nbytes, self.next_number(name)), 2))
            peers.append(f"{'to' if sends else 'from'} {end.peer}")
        return [_Work(self, group, f"{self.collective}, {', '.join(peers)}", meetings)]


class _Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(self, recorder: _Recorder, pool: str, name: str = ""):
        number = recorder.next_number(pool)
        self.recorder, self.value = recorder, Stream(name or f"{pool} {number}", pool, number)

    def wait_event(self, event: _Event) -> None:
        self.recorder.add(Wait(self.value, event.number, event.name))


class _Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, recorder: _Recorder, name: str = "", enable_timing: bool = False):
        self.recorder, self.given_name = recorder, name

    def record(self, stream: _Stream | None = None) -> None:
        stream, recorder = stream or self.recorder.current, self.recorder
        self.number = recorder.next_number("events")
        self.name = self.given_name or f"event {self.number} on {stream.value.name}"
        recorder.add(Record(stream.value, self.number, self.name))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Work:
    """A communication of NCCL's process group, which has a stream for each communicator."""

    def __init__(self, recorder: _Recorder, group: dist.ProcessGroup, name: str, meetings: Sequence[Meeting]):
        self.recorder = recorder
        stream = recorder.communicators[group][1]
        begin, self.end = _Event(recorder, f"work before {name}"), _Event(recorder, name)
        begin.record()
        stream.wait_event(begin)
        recorder.add(Exchange(stream.value, name, tuple(meetings)))
        self.end.record(stream)

    def wait(self) -> bool:
        self.recorder.current.wait_event(self.end)
        return True


@contextmanager
def _recording(plan: ParallelPlan, rank: int) -> Iterator[_Recorder]:
    """Make this process a rank of a job whose other ranks do not exist, and record its operations."""
    recorder, track_wait = _Recorder(rank), CommStats.track_wait

    def note(stats: CommStats, collective: Any) -> Any:
        recorder.collective = collective.name
        return track_wait(stats, collective)

    kinds = "all_reduce", "all_gather", "reduce_scatter"
    reduce, gather, scatter = (partial(recorder.collective_on, kind) for kind in kinds)
    streams = {
        "Stream": lambda device=None: _Stream(recorder, NORMAL),
        "Event": partial(_Event, recorder),
        "stream": recorder.on_stream,
        "current_stream": lambda device=None: recorder.current,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # torch replaces it
        devices = plan.stages[-1].last_rank + 1
        dist.init_process_group("cpu:fake,cuda:fake,meta:fake", store=FakeStore(), rank=rank, world_size=devices)
        stack.callback(dist.destroy_process_group)
        for context in (
            patch.multiple(torch.cuda, **streams),
            patch.multiple(dist, all_reduce=reduce, batch_isend_irecv=recorder.messages),
            patch.multiple(transport, all_gather=gather, reduce_scatter=scatter),
            patch.object(CommStats, "track_wait", note),
            patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
            patch.dict(MIN_CHUNK_BYTES, {_META.type: _CHUNK_BYTES}),
            # The optimizer does not communicate, and has no kernel for this device.
            patch("gpt4d.step.Optimizer"),
        ):
            stack.enter_context(context)
        yield recorder
