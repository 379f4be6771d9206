"""Resolution of ``parallel.*`` for a number of devices: the only place that reads ``parallel.mode``."""

from dataclasses import replace

from gpt4d.config import Config, ConfigError, grid_problem, grid_sizes
from gpt4d.model import registry
from gpt4d.parallel.plan import ParallelPlan, StagePlan
from gpt4d.planner.search import check_open, rank


def resolve(config: Config, world_size: int) -> ParallelPlan:
    """Return the plan of a configuration whose values have been checked.

    Raises ConfigError, naming key, value and remedy, if the model or the batch cannot be split over the devices.
    """
    mode = config.parallel.mode
    if mode == "atp":
        raise ConfigError(
            "parallel.mode=atp: only the planner knows this mode (python -m gpt4d.planner parallel.mode=atp "
            "world_size=N); train on DeviceMesh(d1, d2) with parallel.gx=d1 parallel.gy=d2"
        )
    candidates: tuple[str, ...] = ()
    if mode == "auto":
        config, candidates = _search(config, world_size)
    sizes = grid_sizes(config.parallel, world_size)
    problem = grid_problem(registry.describe(config.model).rules, config.train, sizes)
    if problem:
        raise ConfigError(problem)
    return ParallelPlan(config, (StagePlan(tuple(range(world_size)), sizes),), candidates)


def _search(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on the grid that the planner ranks first. Raises ConfigError if there is none."""
    check_open(config.parallel)
    ranking = rank(config, world_size, top=3)
    ranking.check(config, world_size)
    best = ranking.plans[0]
    x, y, z, data = best.sizes
    parallel = replace(config.parallel, mode="4d", gx=x, gy=y, gz=z, gdata=data, **best.choice)
    train = replace(config.train, micro_batch_size=best.micro_batch)
    lines = tuple(f"{plan.sizes} ({plan.step_time_s:.3g} s per step)" for plan in ranking.plans)
    return replace(config, parallel=parallel, train=train), lines
