"""Every collective that the project issues on tensors. Its axis counts its bytes and its hidden and exposed seconds.

A ``start_`` function returns a handle whose ``wait`` returns the result. ``Axis`` has methods that start and wait. All
ranks of an axis start the same collectives in the same order. On an axis of one device, each collective returns its
input at no cost. Pass the ``parameter`` whose layer communicates: a hang report names that layer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch import nn

from gpt4d.parallel.comm import message_size
from gpt4d.parallel.comm.cpu import shared_memory
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemory
from gpt4d.parallel.comm.cpu.two_level import Piece, TwoLevelTransport
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.comm.stats import CommStats, InFlightCollective, Works
from gpt4d.parallel.symbolic.kernels import MAX, SUM

# torch 2.13 renamed the 1-D forms; 2.11 knows only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {SUM: torch.add, MAX: torch.maximum}
_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}
_PROBE_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}


@dataclass(eq=False)
class Axis:
    """One axis of the grid, seen from this rank: its size, this rank's index along it, and its process group.

    Its methods are the collectives on this axis, which the functions of the same names describe.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    transport: SharedMemory | TwoLevelTransport | None = (
        None  # between CPUs; None if the process group serves all collectives
    )
    traffic: CommStats = field(default_factory=CommStats)

    def start_all_reduce(self, tensor: torch.Tensor, op: str = SUM, parameter: nn.Parameter | None = None) -> Pending:
        return start_all_reduce(tensor, self, op, parameter=parameter)

    def start_all_gather(self, shard: torch.Tensor, parameter: nn.Parameter | None = None) -> Pending:
        return start_all_gather(shard, self, parameter=parameter)

    def start_reduce_scatter(self, full: torch.Tensor, parameter: nn.Parameter | None = None) -> Pending:
        return start_reduce_scatter(full, self, parameter=parameter)

    def all_reduce(self, tensor: torch.Tensor, op: str = SUM, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_all_reduce(tensor, op, parameter).wait()

    def all_gather(self, shard: torch.Tensor, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_all_gather(shard, parameter).wait()

    def reduce_scatter(self, full: torch.Tensor, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_reduce_scatter(full, parameter).wait()


def _trace(start: Callable[..., Pending]) -> Callable[..., Pending]:
    """Name a collective in profiler traces and hang reports: ``all_gather z``, of the layer of ``parameter``."""
    kind = start.__name__.removeprefix("start_")

    @wraps(start)
    def start_traced(tensor: torch.Tensor, axis: Axis, *rest, parameter: nn.Parameter | None = None) -> Pending:
        if axis.size == 1:
            return start(tensor, axis, *rest)
        collective = axis.traffic.start(f"{kind} {axis.name}", parameter)
        with axis.traffic.named_range(collective.name), axis.traffic.track_wait(collective):
            return start(tensor, axis, *rest)

    return start_traced


@_trace
def start_all_reduce(tensor: torch.Tensor, axis: Axis, op: str = SUM) -> Pending:
    """Start to reduce ``tensor`` over the axis **in place**, by ``SUM`` or ``MAX``. Sends 2·(G-1)/G of it (Eq. 3)."""
    if axis.size == 1:
        return Pending(tensor)
    assert tensor.is_contiguous()
    sent_bytes = 2 * (axis.size - 1) / axis.size * tensor.nbytes
    if _shared(tensor, axis):
        combine = _COMBINE[op]

        def reduce(slots: torch.Tensor) -> torch.Tensor:
            combine(slots[0], slots[1], out=tensor)  # in the order of the ranks: the same bits on all of them
            for other in slots[2:]:
                combine(tensor, other, out=tensor)
            return tensor

        return _through_memory(tensor, axis, sent_bytes, reduce)
    if (
        isinstance(hosts := axis.transport, TwoLevelTransport)
        and op == SUM
        and tensor.numel() % hosts.local_size == 0
        and _fits(tensor.view(hosts.local_size, -1))
    ):
        return _start_all_reduce_by_hosts(tensor, axis, hosts, sent_bytes)
    count = message_size.num_pieces(tensor.nbytes / axis.size, _yields(axis)) if tensor.is_cpu else 1
    works = [
        dist.all_reduce(piece, _OPS[op], group=axis.group, async_op=True) for piece in tensor.view(-1).chunk(count)
    ]
    run = InFlightCollective(axis.traffic, works[0] if count == 1 else Works(works, ()), tensor.device, sent_bytes)
    return Pending(tensor, run)


@_trace
def start_all_gather(shard: torch.Tensor, axis: Axis) -> Pending:
    """Start to concatenate the shards of all ranks of the axis along dim 0. Sends (G-1) shards (Eq. 1)."""
    if axis.size == 1:
        return Pending(shard)
    shard = shard.contiguous()
    sent_bytes = (axis.size - 1) * shard.nbytes
    if _shared(shard, axis):
        return _through_memory(shard, axis, sent_bytes, lambda slots: torch.cat(slots.unbind()))
    if isinstance(hosts := axis.transport, TwoLevelTransport) and _fits(shard.view(1, -1).expand(hosts.size, -1)):
        return _start_all_gather_by_hosts(shard, axis, hosts, sent_bytes)
    shape = axis.size * shard.shape[0], *shard.shape[1:]
    if not shard.is_cpu:
        full = shard.new_empty(shape)
        work = _all_gather(full, shard, group=axis.group, async_op=True)
        return Pending(full, InFlightCollective(axis.traffic, work, shard.device, sent_bytes), source=shard)
    works, received = _gather_pieces(shard, axis)
    run = InFlightCollective(axis.traffic, works, shard.device, sent_bytes)
    return Pending(shard, run, lambda _: _join_pieces(received).view(shape))


@_trace
def start_reduce_scatter(full: torch.Tensor, axis: Axis) -> Pending:
    """Start the reduce-scatter over the axis along dim 0. Sends (G-1)/G of the bytes (Eq. 2)."""
    if axis.size == 1:
        return Pending(full)
    full = full.contiguous()
    sent_bytes = (axis.size - 1) / axis.size * full.nbytes
    if _shared(full, axis):
        return _through_memory(full, axis, sent_bytes, lambda slots: slots.chunk(axis.size, 1)[axis.index].sum(0))
    if isinstance(hosts := axis.transport, TwoLevelTransport) and _fits(full.view(axis.size, -1)):
        return _start_reduce_scatter_by_hosts(full, axis, hosts, sent_bytes)
    if not full.is_cpu:
        shard = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
        work = _reduce_scatter(shard, full, group=axis.group, async_op=True)
        return Pending(shard, InFlightCollective(axis.traffic, work, full.device, sent_bytes), source=full)
    works, received = _exchange_parts(full, axis)
    run = InFlightCollective(axis.traffic, works, full.device, sent_bytes)
    return Pending(full, run, lambda _: _add_parts(received, full), source=full)


def _gather_pieces(shard: torch.Tensor, axis: Axis) -> tuple[Works, list[torch.Tensor]]:
    """Start to gather the shards of the axis. Return the handle and, for each piece, a row of each rank."""
    sent = _pieces(shard.view(1, -1), _yields(axis))
    received = [piece.new_empty((axis.size, piece.shape[1])) for piece in sent]
    gather = partial(_all_gather, group=axis.group, async_op=True)
    return Works(list(map(gather, received, sent)), sent), received


def _join_pieces(received: list[torch.Tensor]) -> torch.Tensor:
    """Return the gathered shards, a row of each rank."""
    return received[0] if len(received) == 1 else torch.cat(received, 1)


def _exchange_parts(full: torch.Tensor, axis: Axis) -> tuple[Works, list[torch.Tensor]]:
    """Start to send each rank of the axis its part of ``full`` along dim 0. Return the handle and the received parts.

    It is the first half of a reduce-scatter, which gloo would implement as an all-reduce of twice the bytes.
    """
    sent = [columns.contiguous() for columns in _pieces(full.view(axis.size, -1), _yields(axis))]
    received = [torch.empty_like(columns) for columns in sent]
    exchange = partial(dist.all_to_all_single, group=axis.group, async_op=True)
    return Works(list(map(exchange, received, sent)), sent), received


def _add_parts(received: list[torch.Tensor], full: torch.Tensor) -> torch.Tensor:
    """Return the sum of the parts that the ranks of a group sent: a part of ``full`` along dim 0."""
    return torch.cat([columns.sum(0) for columns in received]).view(-1, *full.shape[1:])


def _pieces(rows: torch.Tensor, yielding: bool = False) -> tuple[torch.Tensor, ...]:
    """Split rows along dim 1 into the pieces in which each is sent."""
    return rows.chunk(message_size.num_pieces(rows[0].nbytes, yielding), 1)


def _yields(axis: Axis) -> bool:
    """Return whether collectives of the axis run ahead of the computation or behind it, rather than in its way."""
    return axis.name in ("z", "data")


def _shared(tensor: torch.Tensor, axis: Axis) -> bool:
    """Return whether the ranks of the axis exchange ``tensor`` through shared memory alone."""
    return isinstance(axis.transport, SharedMemory) and tensor.nbytes <= shared_memory.SLOT_BYTES


def _fits(rows: torch.Tensor) -> bool:
    """Return whether the memory of a host has room for a piece of ``rows``."""
    return _pieces(rows)[0].nbytes <= shared_memory.SLOT_BYTES


def _start_all_reduce_by_hosts(
    tensor: torch.Tensor, axis: Axis, hosts: TwoLevelTransport, sent_bytes: float
) -> Pending:
    """Start an all-reduce that sends each element over a host's link once each way; a ring sends it nearly twice.

    Each rank sums its part over the ranks of its host, then over the hosts, and gives it to the ranks of its host.
    """

    def piece(of_all: torch.Tensor) -> Piece:
        part = of_all.new_empty(of_all.shape[1])

        def exchange() -> dist.Work:
            hosts.before.post(of_all, lambda slots: torch.sum(slots[:, hosts.index], 0, out=part)).wait()
            return dist.all_reduce(part, group=hosts.group, async_op=True)

        return exchange, lambda: hosts.after.post(part, of_all.copy_).wait()

    return _by_hosts(tensor, axis, hosts, map(piece, _pieces(tensor.view(hosts.local_size, -1))), sent_bytes)


def _start_reduce_scatter_by_hosts(
    full: torch.Tensor, axis: Axis, hosts: TwoLevelTransport, sent_bytes: float
) -> Pending:
    """Start a reduce-scatter whose parts are summed inside each host first, so that each leaves a host once."""
    column = hosts.columns[hosts.index]
    result = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))

    def piece(of_all: torch.Tensor, of_result: torch.Tensor) -> Piece:
        sums, received = of_all.new_empty((2, hosts.size, of_all.shape[1]))

        def sum_in_host(slots: torch.Tensor) -> torch.Tensor:
            for index, total in zip(column, sums, strict=True):
                torch.sum(slots[:, index], 0, out=total)
            return sums

        def exchange() -> dist.Work:
            hosts.before.post(of_all, sum_in_host).wait()
            return dist.all_to_all_single(received, sums, group=hosts.group, async_op=True)

        return exchange, lambda: torch.sum(received, 0, out=of_result)

    pieces = map(piece, _pieces(full.view(axis.size, -1)), (of_result[0] for of_result in _pieces(result.view(1, -1))))
    return _by_hosts(result, axis, hosts, pieces, sent_bytes)


def _start_all_gather_by_hosts(shard: torch.Tensor, axis: Axis, hosts: TwoLevelTransport, sent_bytes: float) -> Pending:
    """Start an all-gather in which each shard enters a host once; its ranks then share the received shards."""
    full = shard.new_empty((axis.size * shard.shape[0], *shard.shape[1:]))

    def piece(of_shard: torch.Tensor, of_full: torch.Tensor) -> Piece:
        received = of_shard.new_empty((hosts.size, of_shard.shape[1]))

        def exchange() -> dist.Work:
            return _all_gather(received, of_shard, group=hosts.group, async_op=True)

        def share(slots: torch.Tensor) -> torch.Tensor:
            for column, parts in zip(hosts.columns, slots, strict=True):
                for index, part in zip(column, parts, strict=True):
                    of_full[index].copy_(part)
            return of_full

        return exchange, lambda: hosts.after.post(received, share).wait()

    pieces = map(piece, _pieces(shard.view(1, -1)), _pieces(full.view(axis.size, -1)))
    return _by_hosts(full, axis, hosts, pieces, sent_bytes)


def _by_hosts(
    result: torch.Tensor, axis: Axis, hosts: TwoLevelTransport, pieces: Iterable[Piece], sent_bytes: float
) -> Pending:
    return Pending(result, InFlightCollective(axis.traffic, hosts.start(pieces), result.device, sent_bytes))


def _through_memory(tensor: torch.Tensor, axis: Axis, sent_bytes: float, combine: shared_memory.Combine) -> Pending:
    """Start a collective inside one host. This thread copies and combines, so that time is exposed."""
    assert isinstance(axis.transport, SharedMemory)
    with axis.traffic.time_wait(tensor.device):
        message = axis.transport.post(tensor, combine)
    run = InFlightCollective(axis.traffic, message, tensor.device, sent_bytes)
    return Pending(tensor, run, lambda _: message.wait())


def start_messages(
    sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], axis: Axis
) -> list[dist.Work]:
    """Start messages to and from ranks of the axis, each a contiguous tensor and a rank of the job.

    With gloo, return one handle for each, the sends' first. With NCCL, return one handle for all; it completes when
    every peer has joined. Nothing is counted here, because the resharding that they are steps of counts its bytes.
    """
    ends = [dist.P2POp(dist.isend, tensor, rank, axis.group) for tensor, rank in sends]
    ends += [dist.P2POp(dist.irecv, tensor, rank, axis.group) for tensor, rank in receives]
    return dist.batch_isend_irecv(ends) if ends else []


def probes(axes: Mapping[str, Axis], device: torch.device) -> dict[str, Callable[[], None]]:
    """Return one small all-reduce for each axis, by the axis's name: for preflight checks."""
    elements = _PROBE_ELEMENTS[device.type]

    def exchange(axis: Axis) -> None:
        axis.all_reduce(torch.ones(elements, device=device))[0].item()

    return {name: partial(exchange, axis) for name, axis in axes.items()}
