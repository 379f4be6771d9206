"""gpt4d's training step with AdamW, with Muon, and with the scheme that Megatron calls ``duplicated``."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.adapters.gpt4d import Training
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import WorkerConfig
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import OPTIM, Workload, gpt_workload
from gpt4d.config import GridSizes
from gpt4d.optim import matrices
from gpt4d.optim.muon import SCALES, Muon, orthogonalized
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.grid import Grid

VARIANTS = "adamw", "muon", "duplicated"


class DuplicatedMuon:
    """Muon in which each rank gathers every weight and orthogonalizes all matrices of it.

    The ranks that split a weight gather it: the tensor-parallel ranks, with sharded optimizer states all ranks. The
    next weight is gathered concurrently with the computation. Each rank then applies its shard of the updates.

    Args:
        muon: the optimizer that it replaces, whose weights and settings it takes.
        sharded: the optimizer states are sharded over data.
    """

    def __init__(self, muon: Muon, sharded: bool):
        self.config, self.dtype, self.sizes = muon.config, muon.dtype, muon.grid.sizes
        self.shards: Mapping[str, Any] = {name: weight.shard for name, weight in muon.weights.items()}
        self.momentum = {name: torch.zeros_like(shard, requires_grad=False) for name, shard in self.shards.items()}
        replicas = 1 if sharded else self.sizes.data
        size = self.sizes.devices // replicas
        self.axis: Axis = Grid(GridSizes(x=size, data=replicas)).x  # consecutive ranks
        first = muon.grid.index - muon.grid.index % size
        self.coordinates = [Grid.coordinates(first + place, self.sizes) for place in range(size)]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, skipped: torch.Tensor, divisor: torch.Tensor | None) -> None:
        """Update the weights. Arguments as for ``Muon.step``."""
        kept = 1 - skipped.float()
        names = list(self.shards)
        gathering = [self._start_gather(names[0], skipped, divisor)]
        for name, following in zip(names, [*names[1:], None], strict=True):
            if following:
                gathering.append(self._start_gather(following, skipped, divisor))
            self._update(name, gathering.pop(0).wait(), 1 - lr * weight_decay * kept, -lr * kept)

    def _start_gather(self, name: str, skipped: torch.Tensor, divisor: torch.Tensor | None) -> Pending:
        """Update the momentum of a weight, and start to gather the matrices to orthogonalize."""
        gradient, buffer = self.shards[name].grad, self.momentum[name]
        if divisor is not None:
            gradient.div_(divisor)
        gradient.masked_fill_(skipped, 0.0)
        buffer.lerp_(gradient, (1 - self.config.momentum) * (1 - skipped.float()))
        direction = gradient.lerp_(buffer, self.config.momentum) if self.config.nesterov else buffer
        return self.axis.start_all_gather(direction.to(self.dtype)[None])

    def _update(self, name: str, gathered: torch.Tensor, decay: torch.Tensor, factor: torch.Tensor) -> None:
        shard = self.shards[name]
        spec = shard.spec
        complete = gathered.new_empty(spec.shape)
        for part, indices in zip(gathered, self.coordinates, strict=True):
            complete[self._region(spec, indices)] = part
        own = self._region(spec, self.coordinates[self.axis.index])
        shard.detach().mul_(decay)
        found, targets = matrices.matrices_of(spec, self.sizes), matrices.views(shard.detach(), spec)
        for matrix, view in zip(found, matrices.views(complete, spec), strict=True):
            permuted = view.permute(matrix.order)
            permuted.copy_(orthogonalized(permuted.reshape(matrix.sides), self.config).view(permuted.shape))
        for matrix, target, update in zip(found, targets, matrices.views(complete[own], spec), strict=True):
            target.add_(update.to(shard.dtype) * (factor * SCALES[self.config.scale](*matrix.sides)))

    def _region(self, spec: Any, indices: Mapping[str, int]) -> tuple[slice, ...]:
        return tuple(slice(*ends) for ends in spec.layout.tile(spec.shape, self.sizes._asdict(), indices))


class UpdateTraining(Training):
    """A training step with one of ``VARIANTS``, which also measures the waits of the update."""

    def __init__(self, name: str, variant: str, work: Workload):
        algorithm = "adamw" if variant == "adamw" else "muon"
        super().__init__(name, work, optim=replace(OPTIM, algorithm=algorithm))
        self.axes = [axis for axis in self.grid if axis.size > 1]
        if variant == "duplicated":
            optimizer: Any = self.train_step.optimizer
            optimizer.muon = DuplicatedMuon(optimizer.muon, self.sharded)
            self.axes.append(optimizer.muon.axis)
        self.train_step.before_update = self._before_update

    def _before_update(self) -> None:
        self.earlier = self._read_waits()

    def _read_waits(self) -> Counter[str]:
        waits: Counter[str] = Counter()
        for axis in self.axes:
            waits[axis.name] += axis.traffic.read()["exposed_s"]
        return waits

    def collect_results(self) -> dict:
        update = self._read_waits()
        # Other contenders follow, so the updated rows of sharded states must not be in flight.
        self.train_step.reducer.wait_params()
        self._read_waits()
        return {"loss": self.loss.item(), "exposed_s": self.earlier + update, "update_exposed_s": dict(update)}

    def lead_in(self) -> Callable[[], dict]:
        """Start the all-gathers of updated rows that overlap with the forward of a step."""
        self.train_step.reducer.start_param_all_gather()
        return dict


def updates(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the training of a GPT-2 with all of ``VARIANTS`` on each of ``settings.grids``."""
    share_process_groups()
    contenders = {}
    for grid in settings.grids.split(","):
        for variant in VARIANTS:
            training = UpdateTraining(grid, variant, gpt_workload(settings))
            contenders[f"{grid} {variant}"] = Contender(training.step, training.lead_in if training.sharded else None)
    return contenders
