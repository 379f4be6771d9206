"""Resolution of ``parallel.*`` for a number of devices. No other module reads ``parallel.mode``."""

from dataclasses import replace

from gpt4d.config import Config, ConfigError, grid_problem, with_stages
from gpt4d.config.pipeline import num_microbatches, stage_sizes
from gpt4d.config.schema import MESH_TEXT
from gpt4d.model import registry
from gpt4d.parallel.stage_plan import consecutive_stages
from gpt4d.planner import atp
from gpt4d.planner.search import check_open, rank
from gpt4d.planner.stages import PlanEstimate, stage_parts
from gpt4d.planner.topology import for_devices, total_gib
from gpt4d.planner.workload import converts_weights

_NUM_SHOWN = 3  # number of plans in a run's first line
_MOST_MEMORY = 0.9  # maximum planned share of a device's memory for weights cached by default: plans are 10 % off


def resolve(config: Config, world_size: int) -> PlanEstimate:
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
    microbatches = num_microbatches(config.train, config.parallel, sizes)
    stages = consecutive_stages(sizes, stage_parts(config, description), config.parallel.rank_order)
    return _with_cached_weights(PlanEstimate(config, description, stages, microbatches, candidates))


def _with_cached_weights(plan: PlanEstimate) -> PlanEstimate:
    """Return the plan with a value of ``parallel.cache_layers`` if it is not set.

    If weights are converted but not gathered, all of them are cached if memory allows, if possible for the full step.
    """
    config, parallel, limit = plan.config, plan.config.parallel, _MOST_MEMORY * total_gib(plan.config.cluster)
    if parallel.cache_layers is not None:
        return plan
    scopes = ["step", "microbatch"] if plan.microbatches > 1 and parallel.cache_scope is None else ["microbatch"]
    if all(converts_weights(config, sizes) for sizes in plan.grids):
        for scope in scopes:
            kept = replace(config, parallel=replace(parallel, cache_layers="all", cache_scope=scope))
            if (cached := plan.with_config(kept)).needed_gib(limit) <= limit:
                return cached
    return plan.with_config(replace(config, parallel=replace(parallel, cache_layers=0)))


def _search(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on the grid that the planner ranks first. Raises ConfigError if no grid fits."""
    check_open(config.parallel)
    ranking = rank(config, world_size, top=_NUM_SHOWN)
    ranking.check(config, world_size)
    lines = tuple(f"{plan.grid} ({plan.step_time_s:.3g} s per step)" for plan in ranking.plans)
    return ranking.plans[0].settings, lines


def _mesh(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on a DeviceMesh(d1, d2). The ATP model chooses ``d1`` and ``d2`` if they are not set.

    Raises ConfigError if no mesh is possible. A mesh that is given need not fit the machine ``cluster``.
    """
    plans, given = atp.rank(config, world_size), config.parallel.d1 and config.parallel.d2
    possible = plans if given else [plan for plan in plans if not plan.problem]
    if not possible:
        raise ConfigError(f"parallel.mode=atp: {plans[0]} is not possible, where {MESH_TEXT}: {plans[0].problem}")
    lines = tuple(f"{plan} ({plan.t_comm_s:.3g} s of all-reduces per step)" for plan in possible[:_NUM_SHOWN])
    best = possible[0].settings
    return (replace(best, train=config.train) if given else best), lines
