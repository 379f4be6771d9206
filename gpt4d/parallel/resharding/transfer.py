"""Carries plans out: one link for each direction between two meshes, on gloo and on NCCL alike.

    link = Link("stage 0 to 1", group, device)         all ranks of both meshes, at once
    move = link.prepare(plan, torch.bfloat16)          groups and buffers are made here
    under_way = move.start(local)                      a receiver gives nothing
    received = under_way.wait()                        this rank's part of the tensor; None on a source

The transfers of a link go on one after another in the order in which they were started, the same on all its ranks. So
whatever is first among those not over has all its ranks at it, and no ranks wait for each other in a circle. Links do
not wait for each other: a gradient's has a group and a worker of its own.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from gpt4d.parallel.collectives import start_messages
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.resharding.planning import Plan
from gpt4d.parallel.resharding.program import Message, Step, program
from gpt4d.parallel.traffic import now

# Messages expected beyond the one that is waited for. With none, gloo's sender would wait, between any two, for this
# rank to wake up. With many, the sender whose turn comes next would take its half of the link that much too early.
_AHEAD = 3


class Link:
    """One direction between the meshes of two stages. ``axis`` counts what this rank sends and how long it waits.

    On CPUs a thread does this rank's part: it hands chunks on while the computation goes on. On GPUs it is all queued
    on a stream of the link's own.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device):
        """All ranks of ``group``, those of both meshes, make it at once. No other link may use the group."""
        self.device = device
        self.axis = Axis(name, dist.get_world_size(group), dist.get_rank(group), group)
        dist.barrier(group)  # NCCL wants all ranks in a group's first communication
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        else:
            self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True)
            self._thread.start()

    def prepare(self, plan: Plan, dtype: torch.dtype) -> "Resharding":
        """What it takes to carry out ``plan`` any number of times."""
        return Resharding(self, plan, dtype)

    def post(self, run: Callable[[], None]) -> None:
        self._work.put(run)

    def close(self) -> None:
        """Once all transfers are over."""
        if self.device.type != "cuda":
            self._work.put(None)
            self._thread.join()


def _serve(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while run := work.get():
        run()
        del run  # or the last transfer's tensors would live until the next


class Resharding:
    """A plan on its link, with the buffers it takes."""

    def __init__(self, link: Link, plan: Plan, dtype: torch.dtype):
        self.link, self.plan, self.dtype = link, plan, dtype
        self.program = program(plan, dist.get_rank(), dtype.itemsize)
        self.sent_bytes = self.program.sent_elements * dtype.itemsize
        shape, steps = self.program.shape, self.program.steps
        like = torch.empty(shape, device="meta")
        self._scattered = [not like[step.place].is_contiguous() for step in steps]
        # Transfers of a link follow each other, so one set of buffers is enough for any number under way.
        self._packed = {
            step.task: self._buffer(math.prod(step.shape))
            for step, scattered in zip(steps, self._scattered, strict=True)
            if scattered and step.sending
        }
        received = [
            math.prod(step.shape) for step, s in zip(steps, self._scattered, strict=True) if s and not step.sending
        ]
        # Two: the next step's first messages may come while this step's are put in their place.
        self._arrivals = [self._buffer(max(received, default=0)) for _ in range(2)]
        self._parts = self._buffer(math.prod(shape) if plan.summed and self.program.receives else 0).view(
            shape if plan.summed and self.program.receives else (0,)
        )

    def _buffer(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=self.dtype, device=self.link.device)

    def start(self, local: torch.Tensor | None = None, out: torch.Tensor | None = None) -> "Transfer":
        """Sends ``local``, this rank's part on the source mesh; on the destination mesh receives, into ``out`` if any.

        ``local`` must stay as it is, and ``out`` be left alone, until ``wait``. All ranks of the link start the same
        transfers in the same order. With the strategy signal what is received means nothing.
        """
        if self.program.receives:
            assert local is None
            local = self._destination(out)
        else:
            assert local is not None and local.dtype == self.dtype and out is None
            local = local.detach().contiguous().view(self.program.shape)
        return Transfer(self, local)

    def _destination(self, out: torch.Tensor | None) -> torch.Tensor:
        shape = self.program.shape[self.plan.summed :]
        if out is None:
            make = torch.zeros if self.plan.strategy == "signal" else torch.empty
            return make(shape, dtype=self.dtype, device=self.link.device)
        assert out.shape == shape and out.dtype == self.dtype and out.is_contiguous()
        return out.detach()

    def run(self, local: torch.Tensor) -> None:
        """All of this rank's messages, one step of the plan after another. On a GPU it queues them."""
        whole = self._parts if self.plan.summed and self.program.receives else local
        tiles = [self._tile(number, whole) for number in range(len(self.program.steps))]
        arriving, packed = self._arriving(tiles), set()
        for step, scattered, tile in zip(self.program.steps, self._scattered, tiles, strict=True):
            part = whole[step.place]
            if scattered and step.sending and step.task not in packed:  # once, to however many it is sent
                tile.view(step.shape).copy_(part)
                packed.add(step.task)
            if tile.is_cuda:
                self._queue(step, tile)
            else:
                self._exchange(step, tile, arriving)
            if scattered and not step.sending:
                part.copy_(tile.view(step.shape))
        if whole is not local:
            torch.sum(whole, dim=tuple(range(self.plan.summed)), out=local)

    def _tile(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """What the messages of a step are parts of: the tile itself or, where it is scattered, a copy in one piece."""
        step = self.program.steps[number]
        if not self._scattered[number]:
            return whole[step.place].view(-1)
        return self._packed[step.task] if step.sending else self._arrivals[number % 2][: math.prod(step.shape)]

    def _arriving(self, tiles: list[torch.Tensor]) -> Iterator[dist.Work]:
        """Handles of all messages that this rank receives, in order. Those that come next are expected already."""
        expected: deque[tuple[int, dist.Work]] = deque()
        for number, step in enumerate(self.program.steps):
            for message in (message for moment in step.rounds for message in moment.receives):
                while expected and (len(expected) > _AHEAD or expected[0][0] + 2 <= number):  # two have a buffer
                    yield expected.popleft()[1]
                expected += [(number, work) for work in self._start([], [message], tiles[number])]
        for _, work in expected:
            yield work

    def _exchange(self, step: Step, tile: torch.Tensor, arriving: Iterator[dist.Work]) -> None:
        leaving = []
        for moment in step.rounds:
            leaving += self._start(moment.sends, [], tile)
            for _ in moment.receives:
                next(arriving).wait()
        for work in leaving:
            work.wait()

    def _queue(self, step: Step, tile: torch.Tensor) -> None:
        for moment in step.rounds:
            for work in self._start(moment.sends, moment.receives, tile):
                work.wait()  # the stream does

    def _start(self, sends: Iterable[Message], receives: Iterable[Message], tile: torch.Tensor) -> list[dist.Work]:
        ends = ([(tile[message.start : message.stop], message.peer) for message in side] for side in (sends, receives))
        return start_messages(*ends, self.link.axis)


class Transfer:
    """One transfer under way. ``wait`` gives this rank's part of the tensor, or None on a source."""

    def __init__(self, resharding: Resharding, local: torch.Tensor):
        link = resharding.link
        self.resharding, self.link, self.local = resharding, link, local
        self.error: BaseException | None = None
        self.waited = False
        traffic = link.axis.traffic
        traffic.begun += 1
        traffic.bytes += resharding.sent_bytes
        self.name, self.number = f"reshard {link.axis.name}", traffic.begun
        self.started = now(link.device)
        if link.device.type == "cuda":
            self._queue()
        else:
            self.over = threading.Event()
            link.post(self._run)

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.resharding.run(self.local)
        except BaseException as error:  # raised where it is waited for
            self.error = error
        self.link.axis.traffic.runs.append((self.started, time.perf_counter()))
        self.over.set()

    def _queue(self) -> None:
        stream = self.link.stream
        stream.wait_stream(torch.cuda.current_stream())  # until the source is computed
        with torch.cuda.stream(stream), torch.no_grad():
            self.local.record_stream(stream)
            self.resharding.run(self.local)
            self.over = now(self.link.device)
        self.link.axis.traffic.runs.append((self.started, self.over))

    def wait(self) -> torch.Tensor | None:
        """PeerLost if a message failed, most likely because another rank has ended."""
        traffic = self.link.axis.traffic
        if not self.waited:
            self.waited = True
            before = now(self.link.device)
            with traffic.named_range(f"wait {self.name}"), traffic.noted(self.name, self.number):
                if self.link.device.type == "cuda":
                    torch.cuda.current_stream().wait_event(self.over)
                else:
                    self.over.wait()
                    if self.error is not None:
                        raise self.error
            traffic.waits.append((before, now(self.link.device)))
        return self.local if self.resharding.program.receives else None
