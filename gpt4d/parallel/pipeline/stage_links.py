"""The transfers between pipeline stages: the tensors that cross each edge, their links and layouts."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.simulation import StageTransfer, link_name
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.plan import gradient_plan, plan
from gpt4d.parallel.resharding.transfer import Link, Resharding, ReshardingInFlight
from gpt4d.parallel.stage_plan import StagePlan


class Edge(NamedTuple):
    """A tensor that one virtual stage produces and a later virtual stage uses.

    ``layout`` is the layout on both grids, ``shape`` the global shape for one microbatch. Only tensors of a
    floating-point dtype have a gradient.
    """

    name: str
    source: int  # virtual stages
    target: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point


class Copy(NamedTuple):
    """A weight of one stage that another stage also uses, such as a tied embedding.

    The owner adds the gradient of the copy to its own gradient, updates the weight and sends it to the holder.
    """

    name: str
    owner: int  # stages
    holder: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arrival:
    """The tensors of one transfer, by name. ``wait`` returns the tensors that this rank receives."""

    def __init__(self, transfers: Mapping[str, ReshardingInFlight]):
        self.transfers = transfers

    def wait(self) -> dict[str, torch.Tensor]:
        received = {name: transfer.wait() for name, transfer in self.transfers.items()}
        return {name: tensor for name, tensor in received.items() if tensor is not None}

    @property
    def interval(self) -> tuple:
        """This rank's start of the first transfer and completion of the last transfer. Read it after ``wait``."""
        transfers = list(self.transfers.values())
        return transfers[0].started, transfers[-1].stopped


class Exchange:
    """This rank's links to other stages, and the resharding plans of its tensors.

    All ranks of the job must create it together. Two stages have one link for each direction in which tensors or
    gradients cross.

    Args:
        stages: the plans of all stages.
        edges: the tensors that cross between virtual stages.
        copies: weights that several stages use.
        ranks_per_host: number of consecutive ranks of the job on each host.
        device: this rank's device.
        new_group: creates a process group of the given ranks; all ranks of the job call it.
        chunks: number of chunks of a microbatch. x splits each chunk if the layout names x and ``CHUNK``.
    """

    def __init__(
        self,
        stages: Sequence[StagePlan],
        edges: Sequence[Edge],
        copies: Sequence[Copy],
        ranks_per_host: int,
        device: torch.device,
        new_group: Callable[[list[int]], dist.ProcessGroup],
        chunks: int = 1,
    ):
        rank, count = dist.get_rank(), len(stages)
        # The minimum number of samples that all stages can split among their batch shards.
        self.batch_shards = math.lcm(*(stage.sizes.batch_shards for stage in stages))
        # If x does not split the chunks' tokens, all chunks are one tile.
        meshes = [
            StageMesh.of_grid(stage.ranks, stage.sizes, ranks_per_host, chunks if stage.sizes.x > 1 else 1)
            for stage in stages
        ]
        self.links: dict[tuple[int, int], Link] = {}  # by sending and receiving stage
        self._reshardings: dict[tuple[str, int, int], Resharding] = {}  # by tensor, and sending and receiving stage
        self._names: dict[tuple[int, int], list[str]] = {}
        pairs = {(edge.source % count, edge.target % count) for edge in edges}
        pairs |= {(edge.target % count, edge.source % count) for edge in edges if edge.has_gradient}
        pairs |= {pair for tied in copies for pair in ((tied.owner, tied.holder), (tied.holder, tied.owner))}
        for source, target in sorted((source, target) for source, target in pairs if source != target):
            members = sorted({*stages[source].ranks, *stages[target].ranks})
            group = new_group(members)
            if rank in members:
                self.links[source, target] = Link(link_name(source, target), group, device)
        self._meshes = meshes
        for edge in edges:
            self._prepare(edge)

        self._weights: dict[str, Resharding] = {}  # transfers of copied weights, by name
        self._gradients: dict[str, Resharding] = {}
        self._stage = next(stage.index for stage in stages if rank in stage.ranks)
        self.copies = [tied for tied in copies if self._stage in (tied.owner, tied.holder)]
        for tied in self.copies:
            weight = plan(tied.shape, tied.layout, meshes[tied.owner], tied.layout, meshes[tied.holder])
            self._weights[tied.name] = self.links[tied.owner, tied.holder].prepare(weight, tied.dtype)
            self._gradients[tied.name] = self.links[tied.holder, tied.owner].prepare(gradient_plan(weight), tied.dtype)
        self._arriving: list[ReshardingInFlight] = []  # copied weights that this rank receives
        self._leaving: list[ReshardingInFlight] = []  # copied weights that this rank sends

    def _prepare(self, edge: Edge, gradients: bool = True) -> None:
        source, target = edge.source % len(self._meshes), edge.target % len(self._meshes)
        if (link := self.links.get((source, target))) is None:
            return
        meshes = self._meshes[source], self._meshes[target]
        forward = plan(edge.shape, edge.layout, meshes[0], edge.layout, meshes[1])
        self._add(edge.name, edge.source, edge.target, link.prepare(forward, edge.dtype))
        if gradients and edge.has_gradient:
            back = self.links[target, source].prepare(gradient_plan(forward), edge.dtype)
            self._add(edge.name, edge.target, edge.source, back)

    def without_gradients(self, edges: Sequence[Edge]) -> "Exchange":
        """Return an exchange of other tensors over the same links, without their gradients."""
        other = copy(self)
        other._reshardings, other._names = {}, {}
        for edge in edges:
            other._prepare(edge, gradients=False)
        return other

    def _add(self, name: str, source: int, target: int, resharding: Resharding) -> None:
        self._reshardings[name, source, target] = resharding
        self._names.setdefault((source, target), []).append(name)

    @property
    def axes(self) -> dict[str, Axis]:
        """The axis of each link, which counts its bytes and waiting times, by name."""
        return {link.axis.name: link.axis for link in self.links.values()}

    def start(self, transfer: StageTransfer, sent: Mapping[str, torch.Tensor] | None) -> Arrival:
        """Start sending the tensors ``sent``, by name. Without ``sent``, start receiving."""
        source, target = transfer.action.virtual_stage, transfer.target
        return Arrival(
            {
                name: self._reshardings[name, source, target].start(
                    None if sent is None else sent[name], name=self._describe(name, transfer)
                )
                for name in self._names[source, target]
            }
        )

    def _describe(self, name: str, transfer: StageTransfer) -> str:
        (kind, microbatch, source), target = transfer
        tensor, direction = (name, "forward") if kind == "F" else (f"gradient of {name}", "backward")
        return f"{tensor} of microbatch {microbatch}, {direction} from {self._place(source)} to {self._place(target)}"

    def _place(self, virtual_stage: int) -> str:
        chunk, stage = divmod(virtual_stage, len(self._meshes))
        return f"chunk {chunk} of stage {stage}" if chunk else f"stage {stage}"

    @property
    def owned(self) -> list[str]:
        """Names of this stage's weights that are copied to other stages."""
        return [tied.name for tied in self.copies if tied.owner == self._stage]

    @property
    def held(self) -> list[str]:
        """Names of other stages' weights that this stage has copies of."""
        return [tied.name for tied in self.copies if tied.holder == self._stage]

    def receive_gradients(self) -> dict[str, ReshardingInFlight]:
        """Start to receive the gradients of the copies of this stage's weights."""
        return {name: self.send_gradient(name, None) for name in self.owned}

    def send_gradient(self, name: str, gradient: torch.Tensor | None) -> ReshardingInFlight:
        """Start to send the gradient of a copy, reduced over the batch axes, to its owner, which passes None."""
        transfer = self._gradients[name]
        return transfer.start(gradient, name=f"gradient of the copy of {name}, {transfer.link.axis.name}")

    def start_weight(self, name: str, weight: torch.Tensor) -> None:
        """Start to send ``weight`` to its copy, or to receive it into the copy ``weight`` on the holding stage."""
        transfer = self._weights[name]
        label = f"copy of {name}, {transfer.link.axis.name}"
        if name in self.held:
            self._arriving.append(transfer.start(out=weight, name=label))
        else:
            self._leaving.append(transfer.start(weight, name=label))

    def wait_for_held(self) -> None:
        """Wait until this stage's copies of weights are up to date."""
        while self._arriving:
            self._arriving.pop().wait()

    def wait_for_owned(self) -> None:
        """Wait until the weights of this stage have been sent to their copies, so that they may change."""
        while self._leaving:
            self._leaving.pop().wait()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
