"""Resolution of ``parallel.*`` for a number of devices. No other module reads ``parallel.mode``."""

from collections.abc import Sequence
from dataclasses import replace

from gpt4d.config import Config, ConfigError, GridSizes, grid_problem, with_stages
from gpt4d.config.pipeline import pipeline_microbatches, stage_sizes
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.parallel.stage_plan import StagePlan, consecutive_stages
from gpt4d.plan import ParallelPlan
from gpt4d.planner import atp
from gpt4d.planner.search import check_open, converts_weights, rank
from gpt4d.planner.stages import PipelineEstimate, stage_parts
from gpt4d.planner.topology import for_devices, total_gib

_NUM_SHOWN = 3  # number of plans in a run's first line
_MOST_MEMORY = 0.9  # maximum planned share of a device's memory for weights cached by default: plans are 10 % off


def resolve(config: Config, world_size: int) -> ParallelPlan:
    """Return the plan of a configuration whose values have been checked.

    Raises ConfigError, naming key, value and remedy, if the model or the batch cannot be split over the devices.
    """
    candidates: tuple[str, ...] = ()
    config = replace(config, cluster=for_devices(config.cluster, world_size))
    if config.parallel.mode == "auto":
        config, candidates = _search(config, world_size)
    elif config.parallel.mode == "atp":
        config, candidates = _mesh(config, world_size)
    config = with_stages(config, config.parallel.pipeline.stages or 1)
    sizes = stage_sizes(config.parallel, world_size)
    config = replace(config, model=config.model.on_grids(sizes))
    description = registry.describe_run(config)
    for grid in dict.fromkeys(sizes):
        if problem := grid_problem(description.rules, config.train, config.parallel, grid):
            raise ConfigError(problem)
    microbatches = _microbatches(config, sizes)
    stages = consecutive_stages(sizes, stage_parts(config, description), config.parallel.rank_order)
    config = _with_kept_weights(config, description, stages, microbatches)
    estimate = PipelineEstimate(config, description, stages, microbatches)
    costs = estimate.costs if len(stages) > 1 else None
    return ParallelPlan(config, description, stages, microbatches, estimate.crossing, costs, candidates)


def _with_kept_weights(
    config: Config, description: Description, stages: Sequence[StagePlan], microbatches: int
) -> Config:
    """Return the configuration with a value of ``parallel.cache_layers`` if it is not set.

    If weights are converted but not gathered, all of them are cached if memory allows, if possible for the full step.
    """
    parallel, limit = config.parallel, _MOST_MEMORY * total_gib(config.cluster)
    if parallel.cache_layers is not None:
        return config
    scopes = ["step", "microbatch"] if microbatches > 1 and parallel.cache_scope is None else ["microbatch"]
    if all(converts_weights(config, stage.sizes) for stage in stages):
        for scope in scopes:
            kept = replace(config, parallel=replace(parallel, cache_layers="all", cache_scope=scope))
            if PipelineEstimate(kept, description, stages, microbatches).needed_gib(limit) <= limit:
                return kept
    return replace(config, parallel=replace(parallel, cache_layers=0))


def _microbatches(config: Config, sizes: tuple[GridSizes, ...]) -> int:
    if len(sizes) > 1:
        return pipeline_microbatches(config.train, config.parallel, sizes)
    share = config.train.batch_size // sizes[0].sample_shards(config.parallel.context)
    return share // (config.train.micro_batch_size or share)


def _search(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on the grid that the planner ranks first. Raises ConfigError if no grid fits."""
    check_open(config.parallel)
    ranking = rank(config, world_size, top=_NUM_SHOWN)
    ranking.check(config, world_size)
    best = ranking.plans[0]
    parallel, train = replace(config.parallel, mode="4d", **best.choice), config.train
    if best.pipeline:
        parallel = replace(parallel, pipeline=best.pipeline)
    if not (best.pipeline and best.pipeline.stage_grids):
        parallel = parallel.on_grid(best.sizes)
    if not best.pipeline:
        train = replace(train, micro_batch_size=best.micro_batch)
    lines = tuple(f"{plan.grid} ({plan.step_time_s:.3g} s per step)" for plan in ranking.plans)
    return replace(config, parallel=parallel, train=train), lines


def _mesh(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on a DeviceMesh(d1, d2). The ATP model chooses ``d1`` and ``d2`` if they are not set.

    Raises ConfigError if no mesh is possible. A mesh that is given need not fit the machine ``cluster``.
    """
    parallel, train = config.parallel, config.train
    plans = atp.rank(config, world_size)
    possible = plans if parallel.d1 and parallel.d2 else [plan for plan in plans if not plan.problem]
    if not possible:
        raise ConfigError(
            f"parallel.mode=atp: {plans[0]} is not possible, where gx is d1 and gy is d2: {plans[0].problem}"
        )
    best = possible[0]
    if not (parallel.d1 and parallel.d2):
        train = replace(train, micro_batch_size=best.micro_batch or train.micro_batch_size)
    parallel = parallel.on_grid(best.sizes, mode="4d", d1=None, d2=None, rank_order=best.rank_order)
    lines = tuple(f"{plan} ({plan.t_comm_s:.3g} s of all-reduces per step)" for plan in possible[:_NUM_SHOWN])
    return replace(config, parallel=parallel, train=train), lines
