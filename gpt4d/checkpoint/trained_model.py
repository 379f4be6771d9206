"""Models of checkpoints on a grid of their own, to generate with them and to evaluate them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GRID_KEYS, Config, ConfigError, ModelConfig, ParallelConfig, TrainConfig, check_pipeline
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.planner.resolve import resolve
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage, connect_stages
from gpt4d.task.task import InferenceConfig


@contextmanager
def trained_model(checkpoint: Checkpoint, plan: ParallelPlan, launch: Launch) -> Iterator[Stage]:
    """Return this rank's stage of a checkpoint's model on ``plan``, in a process group that exists inside.

    The stage has the averaged weights if the checkpoint has them.
    """
    with process_group(launch) as job:
        stage = load_stage(checkpoint, plan, launch.rank, job.device, launch.local_world_size)
        yield stage
        if stage.exchange:  # not after an error, which must not wait for transfers
            stage.exchange.close()


def load_stage(
    checkpoint: Checkpoint, plan: ParallelPlan, rank: int, device: torch.device, ranks_per_host: int
) -> Stage:
    """Return the stage of ``plan`` that ``rank`` has, with the weights of a checkpoint. All ranks call it together."""
    own = plan.stage_of(rank)
    grid = Grid(own.sizes, device.type, own.ranks, context=own.sizes.batch_shards)  # all ranks read a single prompt
    stage = build_stage(plan, grid, device, initialized=False)
    if len(plan.stages) > 1:
        connect_stages(plan, stage, ranks_per_host)
    storage.load(checkpoint, stage.module, None, stage.grid)
    storage.load_averages(checkpoint, stage.module, stage.grid)
    return stage


def inference_plan(model: ModelConfig, settings: InferenceConfig, world_size: int) -> ParallelPlan:
    """Return the plan on which a model runs on all processes without training.

    Raises ConfigError if the grid has another number of devices, or if it cannot split the model.
    """
    sizes = settings.sizes
    if sizes.devices * settings.stages != world_size:
        keys, given = ("·".join(map(str, each)) for each in ((*GRID_KEYS, "stages"), (*sizes, settings.stages)))
        raise ConfigError(
            f"{keys}={given}: not a plan for {world_size} process(es); choose sizes with that product, "
            "or start as many with torchrun --nproc-per-node"
        )
    parallel = ParallelConfig(cache_layers=0).on_grid(sizes)
    parallel.pipeline.stages = settings.stages
    length = getattr(model, "max_positions", 1)  # only text models have it
    config = Config(model=model, train=TrainConfig(seq_len=length, batch_size=sizes.batch_shards), parallel=parallel)
    try:
        check_pipeline(config)
        return resolve(config, world_size)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.pipeline.", "").replace("parallel.", "")) from None
