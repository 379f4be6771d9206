"""Execution of plans over links, one per direction between two meshes, with gloo or NCCL.

All ranks of both meshes create the link and prepare the resharding together::

    link = Link("stage 0 to 1", group, device)
    resharding = link.prepare(plan, torch.bfloat16)  # allocates the buffers
    transfer = resharding.start(local)  # receivers pass no tensor
    received = transfer.wait()  # this rank's local tensor; None on a source

The transfers of a link are sequential, in the order of their starts, which is the same on all ranks of the link. So all
ranks work on the first unfinished transfer, and ranks never wait for each other in a cycle. Each link has its own
group, and a thread on a CPU or a stream on a GPU, so that a gradient's transfer does not wait for another link.

On a GPU, the thread that starts a transfer also queues its messages. A GPU may have fewer hardware queues than streams,
and an operation waits for all earlier operations in its queue. Ranks queue all operations in the order of the stages'
programs (gpt4d.parallel.pipeline). In this order they never wait for each other in a cycle, even with one hardware
queue. With a second thread the order is open.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.collectives import Axis, start_messages, transport_of
from gpt4d.parallel.comm.cpu.comm_thread import CommFuture, CommThread
from gpt4d.parallel.comm.stats import now
from gpt4d.parallel.resharding.plan import PeerMessage, ReshardingPlan, SendStep, rank_program

# Number of receives posted in advance. Without them, gloo's sender waits for this rank to wake up between any two
# messages. With many, the next sender takes half of the link's bandwidth too early.
_RECEIVES_AHEAD = 3


class Link:
    """A link between the meshes of two stages in one direction. ``axis`` counts its sent bytes and waiting time.

    On a CPU, a thread sends, receives and forwards this rank's chunks while the computation continues. On a GPU they
    are queued on the link's own stream.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device):
        """Create the link together on all ranks of both meshes, which form ``group``. Only this link uses the group."""
        self.device = device
        self.axis = Axis(name, group.size(), group.rank(), group, transport_of(group, device.type))
        # NCCL requires all ranks in the first communication of a group. With both backends, a barrier uses gloo.
        self.axis.all_reduce(torch.zeros(1, device=device))
        self.axis.traffic.read()
        self.stream = torch.cuda.Stream(device) if device.type != "cpu" else None
        self.worker = CommThread(name) if self.stream is None else None

    def prepare(self, plan: ReshardingPlan, dtype: torch.dtype) -> "Resharding":
        """Allocate the buffers for any number of executions of ``plan``."""
        with self.on_stream():
            return Resharding(self, plan, dtype)

    def on_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def close(self) -> None:
        """End the thread, if any, after all transfers that were started."""
        if self.worker is not None:
            self.worker.close()


class Resharding:
    """A plan on its link, with its buffers."""

    def __init__(self, link: Link, plan: ReshardingPlan, dtype: torch.dtype):
        self.link, self.plan, self.dtype = link, plan, dtype
        self.program = rank_program(plan, dist.get_rank(), dtype.itemsize, link.device.type)
        self.sent_bytes = plan.sent_elements * dtype.itemsize  # by all ranks of the link
        shape, steps = self.program.shape, self.program.steps
        meta = torch.empty(shape, device="meta")
        # Buffers by task, for tiles that are not contiguous. A rank receives and packs each tile once, for any number
        # of receivers. Transfers of a link are sequential, so all transfers share one set of buffers.
        self._packed_tiles = {
            step.task: self._buffer(math.prod(step.shape)) for step in steps if not meta[step.slices].is_contiguous()
        }
        self._link_token = self._buffer(1)
        sums = plan.num_summed and self.program.receives
        self._contributions = self._buffer(math.prod(shape) if sums else 0).view(shape if sums else (0,))

    def _buffer(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=self.dtype, device=self.link.device)

    def start(
        self, local: torch.Tensor | None = None, out: torch.Tensor | None = None, name: str | None = None
    ) -> "ReshardingInFlight":
        """Start sending ``local``, this rank's tensor on the source mesh, or receiving, into ``out`` if given.

        ``name`` names the transfer in hang reports and profiler traces.

        Do not change ``local`` and do not use ``out`` before ``wait`` returns. All ranks of the link must start the
        same transfers in the same order.
        """
        if self.program.receives:
            assert local is None
            local = self._destination(out)
        else:
            assert local is not None and local.dtype == self.dtype and out is None
            local = local.detach().contiguous().view(self.program.shape)
        return ReshardingInFlight(self, local, name or f"reshard {self.link.axis.name}")

    def _destination(self, out: torch.Tensor | None) -> torch.Tensor:
        shape = self.program.shape[self.plan.num_summed :]
        if out is None:
            return torch.empty(shape, dtype=self.dtype, device=self.link.device)
        assert out.shape == shape and out.dtype == self.dtype and out.is_contiguous()
        return out.detach()

    def run(self, local: torch.Tensor) -> None:
        """Exchange all of this rank's messages, step by step; on a GPU, queue them."""
        tensor = self._contributions if self.plan.num_summed and self.program.receives else local
        tiles = [self._flat_tile(step, tensor) for step in self.program.steps]
        receives, packed = self._post_receives(tiles), set()
        for step, tile in zip(self.program.steps, tiles, strict=True):
            view, scattered = tensor[step.slices], step.task in self._packed_tiles
            if scattered and step.sending and step.task not in packed:
                tile.view(step.shape).copy_(view)
                packed.add(step.task)
            _wait_all(start_messages([], self._token(step.previous_sender), self.link.axis))
            if tile.is_cpu:
                self._exchange(step, tile, receives)
            else:
                self._queue(step, tile)
            _wait_all(start_messages(self._token(step.next_sender), [], self.link.axis))
            if scattered and not step.sending:
                view.copy_(tile.view(step.shape))
        if tensor is not local:
            torch.sum(tensor, dim=tuple(range(self.plan.num_summed)), out=local)

    def _flat_tile(self, step: SendStep, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat tile of a step: a view of ``tensor``, or a buffer if the tile is not contiguous."""
        return self._packed_tiles[step.task] if step.task in self._packed_tiles else tensor[step.slices].view(-1)

    def _post_receives(self, tiles: list[torch.Tensor]) -> Iterator[dist.Work]:
        """Yield the handles of all messages that this rank receives, in order; later receives are already posted."""
        posted: deque[tuple[int, dist.Work]] = deque()
        for number, step in enumerate(self.program.steps):
            for message in (message for round_ in step.rounds for message in round_.receives):
                # In flight: all receives of one step, and a few receives of the next step.
                while len(posted) > _RECEIVES_AHEAD and number > posted[0][0]:
                    yield posted.popleft()[1]
                posted += [(number, work) for work in self._start([], [message], tiles[number])]
        for _, work in posted:
            yield work

    def _exchange(self, step: SendStep, tile: torch.Tensor, receives: Iterator[dist.Work]) -> None:
        sends = []
        for round_ in step.rounds:
            sends += self._start(round_.sends, [], tile)
            for _ in round_.receives:
                next(receives).wait()
        _wait_all(sends)

    def _queue(self, step: SendStep, tile: torch.Tensor) -> None:
        for round_ in step.rounds:
            _wait_all(self._start(round_.sends, round_.receives, tile))

    def _token(self, rank: int | None) -> list[tuple[torch.Tensor, int]]:
        """Return the message with which a sender passes a host's link to the next sender, to or from ``rank``."""
        return [] if rank is None else [(self._link_token, rank)]

    def _start(
        self, sends: Iterable[PeerMessage], receives: Iterable[PeerMessage], tile: torch.Tensor
    ) -> list[dist.Work]:
        sent, received = ([(tile[m.start : m.stop], m.peer) for m in messages] for messages in (sends, receives))
        return start_messages(sent, received, self.link.axis)


def _wait_all(handles: list[dist.Work]) -> None:
    """Wait for all messages; on a GPU the current stream waits, not the host."""
    for handle in handles:
        handle.wait()


class ReshardingInFlight:
    """A transfer in flight. ``wait`` returns this rank's local tensor, or None on a source.

    After a source has sent its tensor, ``local`` becomes None, so that the memory can be reused before ``wait``.
    """

    def __init__(self, resharding: Resharding, local: torch.Tensor, name: str):
        link = resharding.link
        self.resharding, self.link = resharding, link
        self.local: torch.Tensor | None = local
        traffic = link.axis.traffic
        traffic.bytes += resharding.sent_bytes
        self.collective = traffic.start(name)
        self.started = now(link.device)  # on a GPU, an event after the source's computation
        self.task: CommFuture | None = None
        if link.worker is not None:
            self.task = link.worker.submit(self._run)
        else:
            assert link.stream is not None
            local.record_stream(link.stream)
            with traffic.track_wait(self.collective):  # in the first transfers the host waits for its peers
                self._run()

    def _run(self) -> None:
        link, traffic = self.link, self.link.axis.traffic
        with link.on_stream():
            if link.stream is not None:
                link.stream.wait_event(self.started)
            assert self.local is not None
            self.resharding.run(self.local)
            if not self.resharding.program.receives:
                self.local = None  # on a GPU, the allocator waits for the link's stream (record_stream)
            self.stopped = now(link.device)
        if link.stream is not None:
            traffic.watch(self.collective, self.stopped)
        if traffic.timed:
            traffic.run_intervals.append((self.started, self.stopped))

    def wait(self) -> torch.Tensor | None:
        """Wait until the transfer is complete; return this rank's local tensor, or None on a source.

        Raises PeerLost if a message failed, most likely because another rank has ended.
        """
        link, traffic = self.link, self.link.axis.traffic
        with (
            traffic.named_range(f"wait {self.collective.name}"),
            traffic.track_wait(self.collective),
            traffic.time_wait(link.device),
        ):
            if self.task is not None:
                self.task.wait()
            else:
                torch.cuda.current_stream(link.device).wait_event(self.stopped)
        return self.local
