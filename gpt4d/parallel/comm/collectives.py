"""Every collective that the project issues on tensors. Its axis counts its bytes and its hidden and exposed seconds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpt4d.parallel.comm.cpu.gloo import GlooTransport
from gpt4d.parallel.comm.pending import SUM, Pending
from gpt4d.parallel.comm.stats import CommStats, InFlightCollective
from gpt4d.parallel.comm.transport import ProcessGroupTransport, Transport

PROBE_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}


@dataclass(eq=False)
class Axis:
    """One axis of the grid, seen from this rank: its size, this rank's index along it, and its process group.

    Its methods are collectives. A ``start_`` method returns a handle whose ``wait`` returns the result; the other
    methods start and wait. All ranks of an axis start the same collectives in the same order. On an axis of one device,
    each collective returns its input at no cost. Pass the ``parameter`` whose layer communicates: a hang report names
    that layer. A collective that ``overlaps`` may continue while the computation does not wait for it.

    ``transport`` exchanges the data of the collectives; an axis of one device has none.
    """

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    transport: Transport | None = None
    traffic: CommStats = field(default_factory=CommStats)

    def start_all_reduce(
        self, tensor: torch.Tensor, op: str = SUM, parameter: nn.Parameter | None = None, overlaps: bool = True
    ) -> Pending:
        """Start to reduce ``tensor`` **in place**, by ``SUM`` or ``MAX``. Sends 2·(G-1)/G of it (Eq. 3)."""
        assert self.size == 1 or tensor.is_contiguous()
        sent_bytes = 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._start("all_reduce", tensor, sent_bytes, parameter, overlaps, op)

    def start_all_gather(
        self, shard: torch.Tensor, parameter: nn.Parameter | None = None, overlaps: bool = True
    ) -> Pending:
        """Start to concatenate the shards of all ranks along dim 0. Sends (G-1) shards (Eq. 1)."""
        return self._start("all_gather", shard, (self.size - 1) * shard.nbytes, parameter, overlaps)

    def start_reduce_scatter(
        self, full: torch.Tensor, parameter: nn.Parameter | None = None, overlaps: bool = True
    ) -> Pending:
        """Start the reduce-scatter along dim 0. Sends (G-1)/G of the bytes (Eq. 2)."""
        sent_bytes = (self.size - 1) / self.size * full.nbytes
        return self._start("reduce_scatter", full, sent_bytes, parameter, overlaps)

    def start_shift(self, tensor: torch.Tensor, parameter: nn.Parameter | None = None) -> Pending:
        """Start to send ``tensor`` to the next rank of the axis, and to receive the tensor of the previous rank.

        The tensors of all ranks have equal shapes. The axis is a ring: the first rank follows the last rank.
        """
        return self._start("shift", tensor, tensor.nbytes, parameter)

    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        """Start to send parts of ``sent`` along dim 0 to the ranks of the axis, and to receive parts from them.

        Args:
            sent: the parts for all ranks, in the order of the ranks; this rank's own part is copied.
            sent_rows: extent of dim 0 of the part for each rank.
            received_rows: extent of dim 0 of the part from each rank.
        """
        own = sent[0:1].nbytes * sent_rows[self.index]
        return self._start("all_to_all", sent, sent.nbytes - own, None, True, sent_rows, received_rows)

    def all_reduce(self, tensor: torch.Tensor, op: str = SUM, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_all_reduce(tensor, op, parameter, overlaps=False).wait()

    def all_gather(self, shard: torch.Tensor, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_all_gather(shard, parameter, overlaps=False).wait()

    def reduce_scatter(self, full: torch.Tensor, parameter: nn.Parameter | None = None) -> torch.Tensor:
        return self.start_reduce_scatter(full, parameter, overlaps=False).wait()

    def _start(
        self,
        kind: str,
        tensor: torch.Tensor,
        sent_bytes: float,
        parameter: nn.Parameter | None,
        overlaps: bool = True,
        *options: Any,
    ) -> Pending:
        """Start a collective that profiler traces and hang reports name, such as ``all_gather z``.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, shift or all_to_all.
            tensor: the tensor of this rank.
            sent_bytes: bytes that this rank sends.
            parameter: belongs to the layer that communicates.
            overlaps: as for ``InFlightCollective``.
            options: additional arguments of the transport.
        """
        if self.size == 1:
            return Pending(tensor)
        traffic, transport, tensor = self.traffic, self.transport, tensor.contiguous()
        assert transport
        collective = traffic.start(f"{kind} {self.name}", parameter)
        with traffic.named_range(collective.name), traffic.track_wait(collective):
            with traffic.time_wait(tensor.device) if transport.copies_at_start else nullcontext():
                pending = getattr(transport, f"start_{kind}")(tensor, *options)
            if traffic.capturing:
                traffic.bytes += sent_bytes
            else:
                pending.run = InFlightCollective(traffic, pending.run, tensor.device, sent_bytes, overlaps)
        return pending


def transport_of(group: dist.ProcessGroup, device_type: str) -> Transport:
    """Return the transport that uses the process group alone, for tensors of a device such as ``cuda``."""
    return GlooTransport(group) if device_type == "cpu" else ProcessGroupTransport(group)


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
    elements = PROBE_ELEMENTS[device.type]

    def exchange(axis: Axis) -> None:
        axis.all_reduce(torch.ones(elements, device=device))[0].item()

    return {name: partial(exchange, axis) for name, axis in axes.items()}
