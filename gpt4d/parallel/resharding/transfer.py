"""Carries plans out: one link for each direction between two meshes, on gloo and on NCCL alike.

    link = Link("stage 0 to 1", group, device)         all ranks of both meshes, at once
    move = link.prepare(plan, torch.bfloat16)          buffers are made here
    under_way = move.start(local)                      a receiver gives nothing
    received = under_way.wait()                        this rank's part of the tensor; None on a source

The transfers of a link go on one after another in the order in which they were started, the same on all its ranks. So
whatever is first among those not over has all its ranks at it, and no ranks wait for each other in a circle. Links
have a group and a worker each, so that a gradient's does not wait for another; on NCCL, which has not been tried, only
as far as it lets two communicators go on at once.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

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

    A thread does this rank's part: it hands chunks on while the computation goes on. On a GPU it queues them on a
    stream of the link's own.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device):
        """All ranks of ``group``, those of both meshes, make it at once. No other link may use the group."""
        self.device = device
        self.axis = Axis(name, dist.get_world_size(group), dist.get_rank(group), group)
        dist.barrier(group)  # NCCL wants all ranks in a group's first communication
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True)
        self._thread.start()

    def prepare(self, plan: Plan, dtype: torch.dtype) -> "Resharding":
        """What it takes to carry out ``plan`` any number of times."""
        with self.on_stream():
            return Resharding(self, plan, dtype)

    def on_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def post(self, run: Callable[[], None]) -> None:
        self._work.put(run)

    def close(self) -> None:
        """Once all transfers are over."""
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
        self.program = program(plan, dist.get_rank(), dtype.itemsize, link.device.type)
        self.sent_bytes = self.program.sent_elements * dtype.itemsize
        shape, steps = self.program.shape, self.program.steps
        like = torch.empty(shape, device="meta")
        # Of the tiles that do not lie in one piece, by task: a rank receives each once and packs it once, to however
        # many it goes. Transfers of a link follow each other: one set of buffers is enough for any number under way.
        self._pieces = {
            step.task: self._buffer(math.prod(step.shape)) for step in steps if not like[step.place].is_contiguous()
        }
        self._word = self._buffer(1)  # what says whose turn it is
        self._parts = self._buffer(math.prod(shape) if plan.summed and self.program.receives else 0).view(
            shape if plan.summed and self.program.receives else (0,)
        )

    def _buffer(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=self.dtype, device=self.link.device)  # what a signal leaves is a number

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
        """All of this rank's messages, one step of the plan after another; on a GPU it queues them."""
        whole = self._parts if self.plan.summed and self.program.receives else local
        tiles = [self._tile(step, whole) for step in self.program.steps]
        arriving, packed = self._arriving(tiles), set()
        for step, tile in zip(self.program.steps, tiles, strict=True):
            part, scattered = whole[step.place], step.task in self._pieces
            if scattered and step.sending and step.task not in packed:
                tile.view(step.shape).copy_(part)
                packed.add(step.task)
            self._await_turn(step.turn_from)
            if tile.is_cuda:
                self._queue(step, tile)
            else:
                self._exchange(step, tile, arriving)
            self._tell_turn(step.turn_to)
            if scattered and not step.sending:
                part.copy_(tile.view(step.shape))
        if whole is not local:
            torch.sum(whole, dim=tuple(range(self.plan.summed)), out=local)

    def _tile(self, step: Step, whole: torch.Tensor) -> torch.Tensor:
        """What the messages of a step are parts of: the tile itself or, where it is scattered, a copy in one piece."""
        return self._pieces[step.task] if step.task in self._pieces else whole[step.place].view(-1)

    def _arriving(self, tiles: list[torch.Tensor]) -> Iterator[dist.Work]:
        """Handles of all messages that this rank receives, in order. Those that come next are expected already."""
        expected: deque[tuple[int, dist.Work]] = deque()
        for number, step in enumerate(self.program.steps):
            for message in (message for moment in step.rounds for message in moment.receives):
                while len(expected) > _AHEAD and number > expected[0][0]:  # all of a step's at once, and a few more
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
        _wait_for(leaving)

    def _queue(self, step: Step, tile: torch.Tensor) -> None:
        for moment in step.rounds:
            _wait_for(self._start(moment.sends, moment.receives, tile))

    def _await_turn(self, rank: int | None) -> None:
        if rank is not None:
            _wait_for(start_messages([], [(self._word, rank)], self.link.axis))

    def _tell_turn(self, rank: int | None) -> None:
        if rank is not None:
            _wait_for(start_messages([(self._word, rank)], [], self.link.axis))

    def _start(self, sends: Iterable[Message], receives: Iterable[Message], tile: torch.Tensor) -> list[dist.Work]:
        ends = ([(tile[message.start : message.stop], message.peer) for message in side] for side in (sends, receives))
        return start_messages(*ends, self.link.axis)


def _wait_for(messages: list[dist.Work]) -> None:
    """On a GPU the stream does."""
    for message in messages:
        message.wait()


class Transfer:
    """One transfer under way. ``wait`` gives this rank's part of the tensor, or None on a source."""

    def __init__(self, resharding: Resharding, local: torch.Tensor):
        link = resharding.link
        self.resharding, self.link, self.local = resharding, link, local
        self.error: BaseException | None = None
        traffic = link.axis.traffic
        traffic.begun += 1
        traffic.bytes += resharding.sent_bytes
        self.name, self.number = f"reshard {link.axis.name}", traffic.begun
        self.started = now(link.device)  # on a GPU: once the source is computed
        if link.stream is not None:
            local.record_stream(link.stream)
        self.over = threading.Event()  # on a GPU: all is queued
        link.post(self._run)

    def _run(self) -> None:
        link = self.link
        try:
            with torch.no_grad(), link.on_stream():
                if link.stream is not None:
                    link.stream.wait_event(self.started)
                self.resharding.run(self.local)
                self.stopped = now(link.device)
            link.axis.traffic.runs.append((self.started, self.stopped))
        except BaseException as error:  # raised where it is waited for
            self.error = error
        self.over.set()

    def wait(self) -> torch.Tensor | None:
        """PeerLost if a message failed, most likely because another rank has ended."""
        link, traffic = self.link, self.link.axis.traffic
        before = now(link.device)
        with traffic.named_range(f"wait {self.name}"), traffic.noted(self.name, self.number):
            self.over.wait()
            if self.error is not None:
                raise self.error
            if link.stream is not None:
                torch.cuda.current_stream(link.device).wait_event(self.stopped)
        traffic.waits.append((before, now(link.device)))
        return self.local if self.resharding.program.receives else None
