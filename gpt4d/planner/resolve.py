"""Resolution of ``parallel.*`` for a number of devices: the only place that reads ``parallel.mode``."""

from dataclasses import replace

from gpt4d.config import Config, ConfigError, grid_problem, grid_sizes
from gpt4d.model import registry
from gpt4d.parallel.plan import ParallelPlan, StagePlan, ranks_in_grid_order
from gpt4d.planner import atp
from gpt4d.planner.search import check_open, rank

_NUM_SHOWN = 3  # plans that a run's first line names


def resolve(config: Config, world_size: int) -> ParallelPlan:
    """Return the plan of a configuration whose values have been checked.

    Raises ConfigError, naming key, value and remedy, if the model or the batch cannot be split over the devices.
    """
    candidates: tuple[str, ...] = ()
    if config.parallel.mode == "auto":
        config, candidates = _search(config, world_size)
    elif config.parallel.mode == "atp":
        config, candidates = _mesh(config, world_size)
    sizes = grid_sizes(config.parallel, world_size)
    problem = grid_problem(registry.describe(config.model).rules, config.train, sizes)
    if problem:
        raise ConfigError(problem)
    ranks = ranks_in_grid_order(sizes, config.parallel.innermost)
    return ParallelPlan(config, (StagePlan(ranks, sizes),), candidates)


def _search(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on the grid that the planner ranks first. Raises ConfigError if there is none."""
    check_open(config.parallel)
    ranking = rank(config, world_size, top=_NUM_SHOWN)
    ranking.check(config, world_size)
    best = ranking.plans[0]
    x, y, z, data = best.sizes
    parallel = replace(config.parallel, mode="4d", gx=x, gy=y, gz=z, gdata=data, **best.choice)
    train = replace(config.train, micro_batch_size=best.micro_batch)
    lines = tuple(f"{plan.grid} ({plan.step_time_s:.3g} s per step)" for plan in ranking.plans)
    return replace(config, parallel=parallel, train=train), lines


def _mesh(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on a DeviceMesh(d1, d2): the ATP model's choice if ``d1`` and ``d2`` leave one.

    Raises ConfigError if no mesh is possible.
    """
    parallel = config.parallel
    d1, d2, copies = parallel.d1, parallel.d2, parallel.gz * (parallel.gdata or 1)
    if d1 and d2 and parallel.gdata is None:
        copies = max(parallel.gz, world_size // (d1 * d2))
    fixed = (d1 or 1) * (d2 or 1) * copies
    if world_size % fixed or (d1 and d2 and world_size != fixed):
        raise ConfigError(
            f"parallel.mode=atp: d1·d2·gz·gdata={d1 or '?'}·{d2 or '?'}·{parallel.gz}·{parallel.gdata or '?'} does not "
            f"fit the {world_size} process(es) of this job; use a divisor of {world_size}, or leave d1 and d2 out"
        )
    plans = atp.rank(config, world_size // copies, copies)
    plans = [plan for plan in plans if plan.mesh.d1 == (d1 or plan.mesh.d1) and plan.mesh.d2 == (d2 or plan.mesh.d2)]
    possible = [plan for plan in plans if not plan.problem]
    if not possible:
        raise ConfigError(
            f"parallel.mode=atp: {plans[0]} is not possible, where gx is d1 and gy is d2: {plans[0].problem}"
        )
    best = possible[0]
    parallel = replace(
        parallel, mode="4d", d1=None, d2=None, gx=best.mesh.d1, gy=best.mesh.d2, gdata=None, innermost=best.innermost
    )
    lines = tuple(f"{plan} ({plan.t_comm_s:.3g} s of all-reduces per step)" for plan in possible[:_NUM_SHOWN])
    return replace(config, parallel=parallel), lines
