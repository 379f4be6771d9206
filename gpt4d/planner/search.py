"""From a configuration and a number of devices to a ranking: all grids, less those that cannot be or do not fit."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpt4d.config import Config, ConfigError, GridSizes, grid_problem
from gpt4d.planner import published
from gpt4d.planner.estimate import Estimate, Plan
from gpt4d.planner.workload import micro_batch_sizes


@dataclass
class Ranking:
    """Plans, the best first, and why there are no others."""

    plans: list[Plan] = field(default_factory=list)
    impossible: int = 0  # grids that the model or the batch cannot be split over
    problem: str | None = None  # what stands against the last of those
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # those that do not fit: the least GiB they need

    def best(self, config: Config, devices: int) -> Plan:
        """ConfigError, saying what would do, where there is none."""
        if self.plans:
            return self.plans[0]
        if not self.too_large:
            raise ConfigError(f"no grid of {devices} device(s) can train this: {self.problem}")
        sizes, least = min(self.too_large.items(), key=lambda found: found[1])
        mends = ["more devices"]
        if config.train.activation_checkpointing == "none":
            mends.append("train.activation_checkpointing=full")
        if not config.optim.shard_states and devices > 1:
            mends.append("optim.shard_states=true")
        if config.train.micro_batch_size not in (None, 1):
            mends.append("a smaller train.micro_batch_size")
        raise ConfigError(
            f"cluster.memory_gib={config.cluster.memory_gib:g}: on {devices} device(s) a step takes {least:.1f} GiB of "
            f"each at the least, on the grid {sizes}; use {', '.join(mends[:-1]) + ' or ' * (len(mends) > 1)}{mends[-1]}"
        )


def grids(devices: int) -> Iterator[GridSizes]:
    """Every (x, y, z, data) whose product is ``devices``."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for x in divisors:
        for y in (d for d in divisors if devices // x % d == 0):
            for z in (d for d in divisors if devices // x // y % d == 0):
                yield GridSizes(x, y, z, devices // x // y // z)


def rank(config: Config, devices: int, cost: str = "ours") -> Ranking:
    """All grids of ``devices`` that can train ``config`` on its cluster, by the time of a step.

    ``cost``: ours; or aware or agnostic, the 4D paper's models of communication, whose seconds are compared instead.
    """
    ranking = Ranking()
    for sizes in grids(devices):
        problem = grid_problem(config.model, config.train, sizes)
        if problem:
            ranking.impossible += 1
            ranking.problem = problem
            continue
        estimate = Estimate(config, sizes)
        micro_batch, needed = largest_micro_batch(estimate)
        if micro_batch is None:
            ranking.too_large[sizes] = needed
        else:
            ranking.plans.append(estimate.plan(micro_batch))
    seconds = {plan.sizes: _seconds(config, plan, cost) for plan in ranking.plans}
    ranking.plans.sort(key=lambda plan: seconds[plan.sizes])
    return ranking


def _seconds(config: Config, plan: Plan, cost: str) -> float:
    if cost == "ours":
        return plan.step_time_s
    return sum(published.communication(config, config.cluster, plan.sizes, aware=cost == "aware").values())


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
        return None, least
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
    """The smallest number of devices on which this trains, if it is at most ``limit``."""
    for devices in range(1, limit + 1):
        for sizes in grids(devices):
            if not grid_problem(config.model, config.train, sizes):
                estimate = Estimate(config, sizes)
                if largest_micro_batch(estimate)[0] is not None:
                    return devices
    return None
