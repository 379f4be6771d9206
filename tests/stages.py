"""Stages of a pipeline on the pool of ranks, and random tokens for them."""

import torch
import torch.distributed as dist

from gpt4d.config import Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.plan import ParallelPlan
from gpt4d.parallel.stage import Stage
from gpt4d.step import build_stage, connect_stages
from gpt4d.validation import validate


def own_stage(
    config: Config, world_size: int, dtype: torch.dtype = torch.float64, ranks_per_host: int = 2
) -> tuple[ParallelPlan, Stage]:
    """Return, on a rank, the plan of ``config`` and this rank's stage, connected to the others."""
    plan = validate(config, world_size)
    stage_plan = plan.stage_of(dist.get_rank())
    grid = Grid(stage_plan.sizes, "cpu", stage_plan.ranks)
    stage = build_stage(config, grid, torch.device("cpu"), dtype, plan=plan)
    if len(plan.stages) > 1:
        connect_stages(plan, stage, ranks_per_host)
    return plan, stage


class RandomTokens:
    """Batches of random tokens, equal on every grid, and the computation of GPT-2 on them."""

    def __init__(self, config: Config, plan: ParallelPlan, stage: Stage):
        self.config, self.plan, self.grid = config, plan, stage.grid
        self.size = plan.micro_batch_size(plan.stages[stage.index])

    def batches(self, step: int):
        train, model = self.config.train, self.config.model
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, model.vocab_size, (train.batch_size, train.seq_len + 1), generator=generator)
        for part in torch.arange(train.batch_size).chunk(self.plan.microbatches):
            own = part.split(self.size)[self.grid.batch_shard]
            yield ids[own, :-1], ids[own, 1:], own

    @staticmethod
    def compute(module, part, batch, received):
        return module.compute(part, received, *batch)
