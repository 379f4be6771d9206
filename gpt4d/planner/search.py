"""From a configuration and a number of devices to a ranking: all grids, less those that cannot be or do not fit."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpt4d.config import (
    ClusterConfig,
    Config,
    ConfigError,
    GridSizes,
    ParallelConfig,
    divisors,
    grid_problem,
)
from gpt4d.model import registry
from gpt4d.planner import paper_models
from gpt4d.planner.estimate import Estimate, Plan
from gpt4d.planner.workload import micro_batch_sizes

_WORTH_A_LOOK = 20  # grids that the quick estimate may have put in another order


@dataclass
class Ranking:
    """Plans, the best first, and why there are no others."""

    plans: list[Plan] = field(default_factory=list)
    fitting: int = 0  # grids, of which ``plans`` are the best
    impossible: int = 0  # grids that the model or the batch cannot be split over
    problem: str | None = None  # what stands against the first of those
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # those that do not fit: the least GiB they need

    def check(self, config: Config, devices: int) -> None:
        """ConfigError, saying what would do, where there is no plan."""
        if self.plans:
            return
        if not self.too_large:
            raise ConfigError(f"no grid of {devices} device(s) can train this: {self.problem}")
        sizes, least = min(self.too_large.items(), key=lambda found: found[1])
        mends = ["more devices"]
        if not config.optim.shard_states and devices > 1:
            mends.append("optim.shard_states=true")
        if Estimate(config, sizes).least_gib() <= config.cluster.memory_gib:  # it is the activations
            if config.train.activation_checkpointing == "none":
                mends.append("train.activation_checkpointing=full")
            if config.train.micro_batch_size not in (None, 1):
                mends.append("a smaller train.micro_batch_size")
        *others, last = mends
        remedy = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(
            f"cluster.memory_gib={config.cluster.memory_gib:g}: on {devices} device(s) a step takes {least:.1f} GiB of "
            f"each at the least, on the grid {sizes}; use {remedy}"
        )


def grids(devices: int) -> Iterator[GridSizes]:
    """Every (x, y, z, data) whose product is ``devices``."""
    for x in divisors(devices):
        for y in divisors(devices // x):
            for z in divisors(devices // x // y):
                yield GridSizes(x, y, z, devices // x // y // z)


def rank(config: Config, devices: int, top: int | None = None, cost: str = "ours") -> Ranking:
    """The ``top`` grids of ``devices`` that train ``config`` on its cluster in the least time for a step; null: all.

    ``cost``: ours; or aware or agnostic, the 4D paper's models of communication, whose seconds are compared instead.
    """
    check_machine(config.cluster, devices)
    description = registry.describe(config.model)
    ranking = Ranking()
    quick: dict[GridSizes, float] = {}
    found: dict[GridSizes, tuple[Estimate, int]] = {}
    for sizes in grids(devices):
        problem = grid_problem(description.rules, config.train, sizes)
        if problem:
            ranking.impossible += 1
            ranking.problem = ranking.problem or problem
            continue
        estimate = Estimate(config, sizes, description)
        micro_batch, needed = largest_micro_batch(estimate)
        if micro_batch is None:
            ranking.too_large[sizes] = needed
            continue
        found[sizes] = estimate, micro_batch
        if cost == "ours":
            quick[sizes] = estimate.quick_s(micro_batch)
        else:
            quick[sizes] = sum(paper_models.communication(config, sizes, aware=cost == "aware").values())
    ranking.fitting = len(found)
    order = sorted(found, key=quick.__getitem__)
    top = len(order) if top is None else top
    worth = order[: max(top, _WORTH_A_LOOK)] if cost == "ours" else order[:top]
    ranking.plans = [found[sizes][0].plan(found[sizes][1]) for sizes in worth]
    if cost == "ours":
        ranking.plans.sort(key=lambda plan: plan.step_time_s)
    else:
        ranking.plans = [replace(plan, published_s=quick[plan.sizes]) for plan in ranking.plans]
    ranking.plans = ranking.plans[:top]
    return ranking


def largest_micro_batch(estimate: Estimate) -> tuple[int | None, float]:
    """The most sequences a device can take at once, and the GiB of a step with them; None, and the least it takes."""
    memory = estimate.config.cluster.memory_gib
    if estimate.least_gib() > memory:
        return None, estimate.least_gib()
    choices = micro_batch_sizes(estimate.config, estimate.sizes)
    needed = estimate.memory_gib(choices[0])
    if needed <= memory:
        return choices[0], needed
    least = estimate.memory_gib(choices[-1])
    if least > memory:
        return None, min(least, needed)  # a single microbatch has no gradients before it
    # More sequences never take less.
    fits, too_many = len(choices) - 1, 0
    while fits - too_many > 1:
        middle = (fits + too_many) // 2
        needed = estimate.memory_gib(choices[middle])
        if needed <= memory:
            fits, least = middle, needed
        else:
            too_many = middle
    return choices[fits], least


def fewest_devices(config: Config, limit: int) -> int | None:
    """The smallest number of devices on which this trains, if it is at most ``limit`` and the machine has as many."""
    description = registry.describe(config.model)
    for devices in range(1, int(min(limit, _devices_of(config.cluster))) + 1):
        for sizes in grids(devices):
            if not grid_problem(description.rules, config.train, sizes):
                estimate = Estimate(config, sizes, description)
                if largest_micro_batch(estimate)[0] is not None:
                    return devices
    return None


def check_open(parallel: ParallelConfig) -> None:
    """ConfigError if a size of the grid, which the planner is to choose, was given."""
    for key, untouched in (("gx", 1), ("gy", 1), ("gz", 1), ("gdata", None)):
        if getattr(parallel, key) != untouched:
            raise ConfigError(f"parallel.{key}={getattr(parallel, key)}: the planner chooses the grid; leave it out")


def check_machine(cluster: ClusterConfig, devices: int) -> None:
    """ConfigError if the machine has fewer devices."""
    if _devices_of(cluster) < devices:
        raise ConfigError(
            f"cluster.levels: {cluster.name} has {_devices_of(cluster)} device(s), not {devices}; use another cluster, "
            "or ranks: null for as many of the outermost groups as there are"
        )


def _devices_of(cluster: ClusterConfig) -> float:
    return math.prod(math.inf if level.ranks is None else level.ranks for level in cluster.levels)
