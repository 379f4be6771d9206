"""One training step: forward and backward over microbatches, reduction, norm, clipping and update."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt4d import optim
from gpt4d.config import Config, OptimConfig
from gpt4d.model import registry
from gpt4d.model.init import initialize
from gpt4d.parallel import collectives, gradients
from gpt4d.parallel.gradients import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage, StageRuntime
from gpt4d.parallel.weights import WeightStream, compute_dtype


class StepResult(NamedTuple):
    """Global values of one step, on the device. The step is skipped where ``skipped`` holds: no weight changes."""

    loss: torch.Tensor
    norm: torch.Tensor
    skipped: torch.Tensor
    stopping: torch.Tensor  # > 0: a rank has been asked to stop


def build_stage(
    config: Config,
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    initialized: bool = True,
) -> Stage:
    """Build the model of ``config`` as one stage on ``grid``.

    Args:
        config: model, precision, activation checkpointing and overlaps.
        grid: the ranks of the stage.
        device: where its parameters live.
        dtype: of the master weights; float64 computes in float64 too.
        initialized: set initial values; without it a checkpoint must be loaded.
    """
    train, description = config.train, registry.describe_run(config)
    recompute = train.activation_checkpointing == "full"
    weights = WeightStream(
        grid,
        dtype if dtype == torch.float64 else compute_dtype(train.precision, device),
        dtype,
        device=device,
        overlap=config.parallel.overlap,
        recompute=recompute,
        num_chunks=config.parallel.chunks,
        scatter_heads=config.parallel.scatter_heads,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    module = registry.build(config.model, weights)
    weights.keep_whole(description.whole_weights)
    if initialized:
        initialize(module, train.seed, grid)
    cached = description.weights_of(description.cached_units(config.parallel.cache_layers))
    for_step = config.parallel.cache_scope == "step"
    return Stage(
        index=0,
        grid=grid,
        weights=weights,
        module=module,
        layer_weights=description.layer_weights(recompute),
        terms=dict(description.contributions),
        cached=() if for_step else cached,
        cached_for_step=cached if for_step else (),
        chunk_terms=description.chunk_terms(config.parallel.chunks),
    )


class TrainStep:
    """Computes training steps of a stage and updates its parameters.

    Args:
        stage: what this rank trains.
        loss_sum: returns the loss of a microbatch, summed over this rank's samples.
        config: the optimizer's settings.
        overlap_data: gradients are summed over data beside the backward.
        before_update: called before parameters change; a checkpoint may still read them.
        is_spike: returns something true for a loss and a norm of a step to skip. It reads device values on the host.
    """

    def __init__(
        self,
        stage: Stage,
        loss_sum: Callable[[nn.Module, Any], torch.Tensor],
        config: OptimConfig,
        overlap_data: bool = True,
        before_update: Callable[[], None] = lambda: None,
        is_spike: Callable[[float, float], object] | None = None,
    ):
        self.stage, self.config = stage, config
        self.before_update, self.is_spike = before_update, is_spike
        parameters = dict(stage.module.named_parameters())
        self.reducer = GradientReducer(stage.weights, parameters, overlap_data, shard=config.shard_states)
        self.shards: Sequence[nn.Parameter] = self.reducer.optimizer_shards
        self.optimizer = optim.build_optimizer(zip(parameters, self.shards, strict=True), config)
        self.runtime = StageRuntime(stage, self.reducer, loss_sum)

    def __call__(
        self, batches: Iterable[Any], microbatches: int, units: int, lr: float, stop: bool = False
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batches: this rank's ``microbatches`` parts of it.
            microbatches: how many there are.
            units: tokens or images of the global batch, which the loss is averaged over.
            lr: learning rate of this step.
            stop: this rank has been asked to stop; all ranks learn it.
        """
        grid, device = self.stage.grid, self.stage.weights.device
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.runtime.forward_backward(batches, microbatches, units)
        squared_norm = gradients.squared_norm(self.shards, grid, device)
        stopping = torch.full((), float(stop), dtype=torch.float64, device=device)  # torch.tensor would synchronize
        totals = torch.stack((mask_replicas(loss, grid), squared_norm, stopping))
        totals = collectives.all_reduce(totals, grid.world)
        loss, norm, stopping = totals[0], totals[1].sqrt(), totals[2]
        skipped = ~(loss.isfinite() & norm.isfinite())
        if self.is_spike and self.is_spike(loss.item(), norm.item()):
            skipped = torch.ones_like(skipped)
        optim.clip(self.shards, norm, self.config.clip_norm)
        self.before_update()
        optim.update(self.optimizer, skipped)
        self.reducer.start_param_all_gather()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, skipped, stopping)

    def evaluate(self, batches: Iterable[Any], microbatches: int) -> torch.Tensor:
        """Return the loss summed over all samples of the job, float64, without training on them."""
        loss = self.runtime.evaluate(batches, microbatches)
        return collectives.all_reduce(mask_replicas(loss, self.stage.grid), self.stage.grid.world)


def mask_replicas(loss: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a loss to be summed over the job: ranks along x and y have the same samples, and one of them counts."""
    return loss if grid.x.index == grid.y.index == 0 else torch.zeros_like(loss)
