"""Stages of a pipeline on the pool of ranks, and random tokens for them."""

import pytest
import torch
import torch.distributed as dist

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import own_segments
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.step import build_stage, connect_stages, mask_replicas
from gpt4d.validation import validate
from tests.support.grids import fill_from_hf, to_hf


def own_stage(
    config: Config, world_size: int, dtype: torch.dtype = torch.float64, ranks_per_host: int = 2
) -> tuple[ParallelPlan, Stage]:
    """Return, on a rank, the plan of ``config`` and this rank's stage, connected to its neighbors."""
    plan = validate(config, world_size)
    return plan, connected_stage(plan, dtype, ranks_per_host)


def connected_stage(plan: ParallelPlan, dtype: torch.dtype = torch.float64, ranks_per_host: int = 2) -> Stage:
    """Return, on a rank, this rank's stage of a plan, connected to its neighbors."""
    stage_plan = plan.stage_of(dist.get_rank())
    parallel = plan.config.parallel
    grid = Grid(stage_plan.sizes, "cpu", stage_plan.ranks, context=parallel.context, expert_data=parallel.expert_data)
    stage = build_stage(plan.config, grid, torch.device("cpu"), dtype, plan=plan)
    if len(plan.stages) > 1:
        connect_stages(plan, stage, ranks_per_host)
    return stage


def own_tokens(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return this rank's segments of values [sequences, length, …]; other values, such as sample ids, are complete."""
    context = grid.context
    return values if values.dim() == 1 or context.size == 1 else own_segments(values, context.size, context.index)


def float64_step(
    config: Config, world_size: int, state: dict[str, torch.Tensor], batch: list[torch.Tensor], compute, units: int
) -> tuple[list[float], dict]:
    """On a rank: the losses of an evaluation and of a step, and this stage's parts of its gradients, by name.

    ``state``: weights by the names of the family's library. ``batch``: tensors of the global batch. ``units``: what
    the loss is divided by.
    """
    plan, stage = own_stage(config, world_size, ranks_per_host=world_size)
    fill_from_hf(stage.module, state)
    grid, size = stage.grid, plan.micro_batch_size(plan.stages[stage.index])

    def batches():
        for part in torch.arange(len(batch[0])).chunk(plan.microbatches):
            own = part.split(size)[grid.sample_shard]
            yield [own_tokens(tensor[own], grid) for tensor in batch]

    trained = {name: p for name, p in stage.module.named_parameters() if not p.spec.frozen}
    reducer = GradientReducer(stage.weights, trained)
    runtime = StageRuntime(stage, reducer, compute)
    losses = [runtime.evaluate(batches(), plan.microbatches) / units]
    losses.append(runtime.forward_backward(batches(), plan.microbatches, units))
    losses = [grid.world.all_reduce(mask_replicas(loss, grid)).item() for loss in losses]
    if stage.exchange:
        stage.exchange.close()
    own = ((name, p) for name, p in trained.items() if name not in stage.copies)
    found = {name: LocalShard(p.grad, p.spec) for name, p in own}
    return losses, {n: (part.spec.stored_shape, part.slices(grid), part.stored(grid)) for n, part in found.items()}


def check_float64_step(answers, config: Config, loss: float, grads: dict[str, torch.Tensor]) -> None:
    """Compare what ``float64_step`` has returned on all ranks with the library's loss and gradients."""
    wholes: dict[str, torch.Tensor] = {}
    for losses, parts in answers:
        assert losses == [pytest.approx(loss, rel=1e-12)] * 2
        for name, (shape, place, part) in parts.items():
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            whole[place] = part
    ours = to_hf(wholes, config.model)
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        # A bias before a norm of one group per channel has no gradient but for rounding.
        assert (ours[name] - grad).norm() <= 1e-12 * max(grad.norm(), 1e-3), name


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
        return module.compute(part, received, *batch)
