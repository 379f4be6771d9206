"""Stages of a pipeline on the pool of ranks, their steps in float64, and random tokens for them."""

import pytest
import torch
import torch.distributed as dist

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config
from gpt4d.model import registry
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.routing import Routers
from gpt4d.parallel.layers.sequence import own_segments
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.step import build_stage, connect_stages, mask_replicas
from gpt4d.task import registry as tasks
from gpt4d.validation import validate
from tests.support.grids import fill_from_hf, to_hf

_CPU = torch.device("cpu")


def own_stage(
    config: Config, world_size: int, dtype: torch.dtype = torch.float64, ranks_per_host: int = 2
) -> tuple[ParallelPlan, Stage]:
    """Return, on a rank, the plan of ``config`` and this rank's stage, connected to its neighbors."""
    plan = validate(config, world_size)
    return plan, connected_stage(plan, dtype, ranks_per_host)


def connected_stage(plan: ParallelPlan, dtype=torch.float64, ranks_per_host: int = 2, device=_CPU) -> Stage:
    """Return, on a rank, this rank's stage of a plan, connected to its neighbors."""
    own, parallel = plan.stage_of(dist.get_rank()), plan.config.parallel
    grid = Grid(own.sizes, device.type, own.ranks, context=parallel.context, expert_data=parallel.expert_data)
    stage = build_stage(plan, grid, device, dtype)
    if len(plan.stages) > 1:
        connect_stages(plan, stage, ranks_per_host)
    return stage


def own_tokens(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return this rank's segments of values [sequences, length, …]; other values, such as sample ids, are complete."""
    context = grid.context
    return values if values.dim() == 1 or context.size == 1 else own_segments(values, context.size, context.index)


def own_step(
    plan: ParallelPlan, stage: Stage, compute, batches, units: int, unpadded: int | None = None, routers=None
) -> tuple[list[float], dict]:
    """On a rank: the losses of an evaluation and of a step, and this stage's parts of its gradients, by name.

    ``batches()`` returns the microbatches of both. ``units``: what the loss is divided by; ``unpadded``: what the
    losses of ``routers`` are divided by. A part is the shape of the parameter, the part's slices and its values.
    """
    trained = {name: p for name, p in stage.module.named_parameters() if not p.spec.frozen}
    runtime = StageRuntime(stage, GradientReducer(stage.weights, trained), compute)
    (routers or Routers(stage.module, stage.routers)).begin(unpadded or units)
    losses = [runtime.evaluate(batches(), plan.microbatches) / units]
    losses.append(runtime.forward_backward(batches(), plan.microbatches, units))
    losses = [stage.grid.world.all_reduce(mask_replicas(loss, stage.grid)).item() for loss in losses]
    if stage.exchange:
        stage.exchange.close()
    found = {name: LocalShard(p.grad, p.spec) for name, p in trained.items() if name not in stage.copies}
    grid = stage.grid
    return losses, {n: (part.spec.stored_shape, part.slices(grid), part.stored(grid)) for n, part in found.items()}


def float64_step(
    config: Config, world_size: int, state: dict[str, torch.Tensor], batch: list[torch.Tensor], compute, units: int
) -> tuple[list[float], dict]:
    """Return the results of ``own_step`` for weights by the names of the family's library and a global batch."""
    plan, stage = own_stage(config, world_size, ranks_per_host=world_size)
    fill_from_hf(stage.module, state)
    grid, size = stage.grid, plan.micro_batch_size(plan.stages[stage.index])

    def batches():
        for part in torch.arange(len(batch[0])).chunk(plan.microbatches):
            own = part.split(size)[grid.sample_shard]
            yield [own_tokens(tensor[own], grid) for tensor in batch]

    return own_step(plan, stage, compute, batches, units)


def connected_task(config: Config, plan: ParallelPlan, stage: Stage):
    """Return, on a rank, the task of a configuration, connected to the stage."""
    task = tasks.get(registry.of(config.model).task).create(config)
    task.connect(stage, plan.micro_batch_size(plan.stages[stage.index]))
    return task


def step_of_task(config: Config, world_size: int) -> tuple[list[float], dict]:
    """Return the results of ``own_step`` for the first batch of the configured task."""
    plan, stage = own_stage(config, world_size, ranks_per_host=world_size)
    task = connected_task(config, plan, stage)
    units = config.train.batch_size * config.train.seq_len
    return own_step(plan, stage, task.compute, lambda: task.batches(0), units)


def check_step(answers, losses: list[float], gradients: dict[str, torch.Tensor], to_names=None, floor=0.0) -> None:
    """Compare what ``own_step`` has returned on all ranks with the losses and the gradients of one device.

    ``to_names`` converts gradients by parameter to those of ``gradients``. Norms below ``floor`` count as ``floor``.
    """
    wholes: dict[str, torch.Tensor] = {}
    for found, parts in answers:
        assert found == pytest.approx(losses, rel=1e-12)
        for name, (shape, place, part) in parts.items():
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            whole[place] = part
    ours = to_names(wholes) if to_names else wholes
    assert ours.keys() == gradients.keys()
    for name, grad in gradients.items():
        assert (ours[name] - grad).norm() <= 1e-12 * max(grad.norm(), floor), name


def check_float64_step(answers, config: Config, loss: float, grads: dict[str, torch.Tensor]) -> None:
    """Compare what ``float64_step`` has returned on all ranks with the library's loss and gradients."""
    # A bias before a norm of one group per channel has no gradient but for rounding.
    check_step(answers, [loss, loss], grads, lambda wholes: to_hf(wholes, config.model), floor=1e-3)


class RandomTokens:
    """Batches of random tokens, equal on every grid, and the computation of a model of text on them."""

    def __init__(self, config: Config, plan: ParallelPlan, stage: Stage):
        self.config, self.plan, self.grid = config, plan, stage.grid
        self.size = plan.micro_batch_size(plan.stages[stage.index])

    def batches(self, step: int):
        train, model = self.config.train, self.config.model
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, model.vocab_size, (train.batch_size, train.seq_len + 1), generator=generator)
        for part in torch.arange(train.batch_size).chunk(self.plan.microbatches):
            own = part.split(self.size)[self.grid.sample_shard]
            yield own_tokens(ids[own, :-1], self.grid), own_tokens(ids[own, 1:], self.grid), own

    @staticmethod
    def compute(module, part, batch, received):
        return module.spec.compute(module, part, received, *batch)
