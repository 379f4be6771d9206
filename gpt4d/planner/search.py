"""Search for the best grid of a configuration: all grids, ranked, without the impossible and the too large ones."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gpt4d.config import ClusterConfig, Config, ConfigError, GridSizes, ParallelConfig, grid_problem
from gpt4d.model import registry
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.planner import paper_models, pipelines
from gpt4d.planner.estimate import Estimate, Plan
from gpt4d.planner.topology import for_devices, total_gib
from gpt4d.planner.workload import Descriptions, compute_bytes, grids, micro_batch_sizes

_MAX_CONSIDERED = 80  # grids whose step is walked through; of more, those with the least computation and sums
_MIN_ESTIMATED = 20  # grids estimated in full, since their order by the quick estimate may be wrong
_NUM_IMPROVED = 3  # of these, the fastest that gather weights, sum outputs or only convert weights: settings are tried
_LEAST_GAIN = 0.01  # of the step time, for which a setting is worth its memory


@dataclass
class Ranking:
    """Plans, best first, and the reasons why other grids are missing."""

    plans: list[Plan] = field(default_factory=list)
    fitting: int = 0  # number of grids that fit; ``plans`` are the best of them
    impossible: int = 0  # number of grids that the model or the batch cannot be split over
    problem: str | None = None  # why the first impossible grid is impossible
    pruned: int = 0  # number of grids and pipelines that only computation and sums of outputs have judged
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # grids that do not fit, and the GiB they need

    def check(self, config: Config, devices: int) -> None:
        """Raise ConfigError, with remedies, if there is no plan."""
        if self.plans:
            return
        if not self.too_large:
            raise ConfigError(f"no grid of {devices} device(s) is possible; the first: {self.problem}")
        sizes, least = min(self.too_large.items(), key=lambda item: item[1])
        remedies = ["more devices"]
        if not config.optim.shard_states and devices > 1:
            remedies.append("optim.shard_states=true")
        if Estimate(config, sizes).least_gib() <= total_gib(config.cluster):  # activations do not fit
            if config.train.activation_checkpointing != "full":
                remedies.append("train.activation_checkpointing=full")
            if config.train.micro_batch_size not in (None, 1):
                remedies.append("a smaller train.micro_batch_size")
        *others, last = remedies
        remedy = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(
            f"cluster.memory_gib={total_gib(config.cluster):.4g}: on {devices} device(s), a step needs at least "
            f"{least:.1f} GiB of each (grid {sizes}); use {remedy}"
        )


def rank(config: Config, devices: int, top: int | None = None, cost: str = "ours") -> Ranking:
    """Rank the grids and pipelines of ``devices`` devices that can train ``config``, fastest step first.

    Args:
        config: the configuration; its grid sizes are ignored.
        devices: the number of devices.
        top: maximum number of plans; None for all.
        cost: ``ours`` compares the predicted time of a step, ``aware`` and ``agnostic`` the seconds of communication of
            the 4D paper's models.

    Raises ConfigError if the cluster has fewer devices.
    """
    check_machine(config.cluster, devices)
    config = replace(config, cluster=for_devices(config.cluster, devices))
    descriptions = Descriptions(config)
    ranking = _rank_grids(config, devices, descriptions, top, cost) if _may_have_one_stage(config) else Ranking()
    if cost == "ours" and _may_have_stages(config):
        found = pipelines.rank(config, devices, descriptions)
        ranking.pruned += found.pruned
        ranking.problem = ranking.problem or found.problem
        ranking.fitting += len(found.plans)
        ranking.too_large |= found.too_large
        ranking.plans = sorted(ranking.plans + found.plans, key=lambda plan: plan.step_time_s)[:top]
    ranking.plans = [_with_explicit_cache(plan, config) for plan in ranking.plans]
    return ranking


def _with_explicit_cache(plan: Plan, config: Config) -> Plan:
    """Return the plan with what it assumes of ``parallel.cache_layers``, if a run on its grids would choose that."""
    kept = config.parallel.cache_layers is not None or "cache_layers" in plan.choice
    if kept or not all(converts_weights(config, sizes) for sizes in plan.stages or (plan.sizes,)):
        return plan
    return replace(plan, choice={**plan.choice, "cache_layers": 0})


def _rank_grids(config: Config, devices: int, descriptions: Descriptions, top: int | None, cost: str) -> Ranking:
    """Rank the grids on which one stage has the whole model."""
    ranking = Ranking()
    possible: list[Estimate] = []
    for sizes in grids(devices):
        description = descriptions.on([sizes])
        problem = grid_problem(description.rules, config.train, config.parallel, sizes)
        if problem:
            ranking.impossible += 1
            ranking.problem = ranking.problem or problem
        elif (estimate := Estimate(config, sizes, description)).least_gib() > total_gib(config.cluster):
            ranking.too_large[sizes] = estimate.least_gib()
        else:
            possible.append(estimate)
    if cost == "ours" and len(possible) > _MAX_CONSIDERED:
        possible.sort(key=lambda estimate: paper_models.busy_s(config, estimate.sizes, estimate.description))
        ranking.pruned = len(possible) - _MAX_CONSIDERED
        del possible[_MAX_CONSIDERED:]
    quick: dict[GridSizes, float] = {}
    candidates: dict[GridSizes, tuple[Estimate, int]] = {}
    for estimate in possible:
        sizes = estimate.sizes
        if cost == "ours":
            estimate = _with_larger_micro_batch(estimate)
        micro_batch, needed = largest_micro_batch(estimate)
        if micro_batch is None:
            ranking.too_large[sizes] = needed
            continue
        if cost == "ours":
            quick[sizes] = estimate.quick_s(micro_batch)
        else:
            quick[sizes] = sum(paper_models.communication(config, sizes, aware=cost == "aware").values())
        candidates[sizes] = estimate, micro_batch
    ranking.fitting = len(candidates)
    order = sorted(candidates, key=quick.__getitem__)
    top = len(order) if top is None else top
    estimated = [candidates[sizes] for sizes in order[: max(top, _MIN_ESTIMATED) if cost == "ours" else top]]
    if cost == "ours":
        estimated = [(_faster_order(estimate, micro_batch), micro_batch) for estimate, micro_batch in estimated]
    ranking.plans = [estimate.plan(micro_batch) for estimate, micro_batch in estimated]
    if cost == "ours":
        ranking.plans.sort(key=lambda plan: plan.step_time_s)
        split = (
            lambda sizes: sizes.z > 1,
            lambda sizes: sizes.x * sizes.y > 1,
            lambda sizes: sizes.data == sizes.devices and converts_weights(config, sizes),
        )
        places = [[n for n, plan in enumerate(ranking.plans) if test(plan.sizes)][:_NUM_IMPROVED] for test in split]
        for place in set().union(*places):
            ranking.plans[place] = _improve(ranking.plans[place], config)
        ranking.plans.sort(key=lambda plan: plan.step_time_s)
    else:
        ranking.plans = [replace(plan, published_s=quick[plan.sizes]) for plan in ranking.plans]
    ranking.plans = ranking.plans[:top]
    return ranking


def _faster_order(estimate: Estimate, micro_batch: int) -> Estimate:
    """Return the estimate for the faster order of ranks: x innermost if both are equally fast."""
    config, sizes = estimate.config, estimate.sizes
    if config.parallel.innermost is None and sizes.x > 1 and sizes.y > 1:
        other = Estimate(config, sizes, estimate.description, {**estimate.choice, "innermost": "y"})
        return min(estimate, other, key=lambda estimate: estimate.quick_s(micro_batch))
    return estimate


def _improve(plan: Plan, config: Config) -> Plan:
    """Return the plan with the settings of ``parallel``, one after another, that make its step faster and still fit."""
    for alternatives in _settings(plan, config, len(registry.describe(config.model).blocks)):
        best = plan
        for setting in alternatives:
            estimate = Estimate(config, plan.sizes, choice={**plan.choice, **setting})
            micro_batch = largest_micro_batch(estimate)[0]
            if micro_batch is None:
                continue
            other = estimate.plan(micro_batch)
            if other.step_time_s < min(best.step_time_s, (1 - _LEAST_GAIN) * plan.step_time_s):
                best = other
        plan = best
    return plan


def _settings(plan: Plan, config: Config, blocks: int) -> Iterator[list[dict[str, Any]]]:
    """Yield alternatives to try for a grid. What the configuration sets stays as it is."""
    parallel, sizes = config.parallel, plan.sizes
    samples = config.train.batch_size // sizes.batch_shards
    if parallel.whole_layers == 0 and sizes.z > 1:
        counts = sorted({eighths * blocks // 8 for eighths in (1, 2, 3, 4)} - {0})
        yield [{"whole_layers": count} for count in counts]
    # Cached weights are gathered, and converted, less often.
    cached = {"cache_layers": parallel.cache_layers or "all"}
    if parallel.cache_layers != 0 and (sizes.z > 1 or converts_weights(config, sizes)):
        if parallel.cache_scope is None and samples > plan.micro_batch:
            yield [{**cached, "cache_scope": "step"}]
        elif parallel.cache_layers is None and sizes.z == 1:
            yield [cached]
    if _may_split_tokens(config, sizes) and "sequence_parallel" not in plan.choice:
        yield [{"sequence_parallel": True}]
    if parallel.chunks == 1 and sizes.x * sizes.y > 1:
        yield [{"chunks": count} for count in (2, 4)]


def converts_weights(config: Config, sizes: GridSizes) -> bool:
    """Return whether weights are converted, but not gathered."""
    return sizes.z == 1 and compute_bytes(config) < MASTER_BYTES


def _with_larger_micro_batch(estimate: Estimate) -> Estimate:
    """Return the estimate, with split tokens where memory limits the microbatch and a larger one fits then."""
    config, sizes, micro_batch = estimate.config, estimate.sizes, largest_micro_batch(estimate)[0] or 0
    if micro_batch < estimate.share and _may_split_tokens(config, sizes):
        split = Estimate(config, sizes, estimate.description, {**estimate.choice, "sequence_parallel": True})
        if (largest_micro_batch(split)[0] or 0) > micro_batch:
            return split
    return estimate


def _may_split_tokens(config: Config, sizes: GridSizes) -> bool:
    return not config.parallel.sequence_parallel and sizes.x > 1 and config.train.seq_len % sizes.x == 0


def largest_micro_batch(estimate: Estimate) -> tuple[int | None, float]:
    """Return the largest microbatch per device that fits and the GiB it needs; None and the least GiB if none fits."""
    memory = total_gib(estimate.config.cluster)
    if estimate.least_gib() > memory:
        return None, estimate.least_gib()
    choices = micro_batch_sizes(estimate.config, estimate.sizes)
    if not choices:
        return None, estimate.least_gib()
    needed = estimate.memory_gib(choices[0])
    if needed <= memory:
        return choices[0], needed
    least = estimate.memory_gib(choices[-1])
    if least > memory:
        return None, min(least, needed)  # a single microbatch has no accumulated gradients
    # Among several microbatches, larger ones never need less memory, so bisection finds the largest that fits.
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
    """Return the fewest devices, up to ``limit`` and the machine's number, that can train this; None if none can."""
    descriptions = Descriptions(config)
    for devices in range(1, int(min(limit, _devices_of(config.cluster))) + 1):
        shared = replace(config, cluster=for_devices(config.cluster, devices))
        if total_gib(shared.cluster) < shared.cluster.reserved_gib:
            return None  # more devices of a node that share its memory have less each
        for sizes in grids(devices) if _may_have_one_stage(config) else ():
            description = descriptions.on([sizes])
            if not grid_problem(description.rules, config.train, config.parallel, sizes):
                estimate = Estimate(shared, sizes, description)
                if largest_micro_batch(_with_larger_micro_batch(estimate))[0] is not None:
                    return devices
        if _may_have_stages(config) and pipelines.any_fits(shared, devices, descriptions):
            return devices
    return None


def _may_have_one_stage(config: Config) -> bool:
    return config.parallel.pipeline.stages in (None, 1)


def _may_have_stages(config: Config) -> bool:
    return config.parallel.pipeline.stages != 1 and config.train.micro_batch_size is None


def check_open(parallel: ParallelConfig) -> None:
    """Raise ConfigError if a size of the grid is set, which the planner chooses."""
    for key, default in (("gx", 1), ("gy", 1), ("gz", 1), ("gdata", None)):
        if getattr(parallel, key) != default:
            raise ConfigError(f"parallel.{key}={getattr(parallel, key)}: the planner chooses the grid; leave it out")
    if (grids := parallel.pipeline.stage_grids) is not None:
        raise ConfigError(f"parallel.pipeline.stage_grids={grids}: the planner chooses the grids; leave it out")


def check_machine(cluster: ClusterConfig, devices: int) -> None:
    """Raise ConfigError if the machine has fewer than ``devices`` devices."""
    if _devices_of(cluster) < devices:
        raise ConfigError(
            f"cluster.levels: {cluster.name} has {_devices_of(cluster)} device(s), not {devices}; use another cluster, "
            "or set ranks: null in the outermost level"
        )


def _devices_of(cluster: ClusterConfig) -> float:
    return math.prod(math.inf if level.ranks is None else level.ranks for level in cluster.levels)
