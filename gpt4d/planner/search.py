"""Search for the best grid of a configuration: a ranking of all grids that are possible and fit in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpt4d.config import Config, ConfigError, GridSizes, ParallelConfig, grid_problem, value_of
from gpt4d.model import registry
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner import paper_models, pipelines
from gpt4d.planner.capacity import (
    check_machine,
    estimate_of,
    largest_micro_batch,
    least_gib,
    may_have_one_stage,
    may_have_stages,
    may_split_tokens,
    with_larger_micro_batch,
)
from gpt4d.planner.estimate import Estimate, Plan
from gpt4d.planner.options import KEYS, RECOMPUTATION, Level, as_overrides, levels
from gpt4d.planner.topology import for_devices, total_gib, usable_gib
from gpt4d.planner.workload import compute_bytes, compute_s, grids, micro_batch_sizes, possible_contexts

_FURTHER = 5  # number of grids beyond ``top`` that are estimated in full: the quick estimate may order them wrongly
_LEAST_BUSY = 0.6  # minimum share of ``paper_models.busy_s`` that a step takes, whose sums overlap with computation
_NUM_IMPROVED = 3  # number of fastest grids of each kind (gather, all-reduce, convert) for which settings are tried
_LEAST_GAIN = 0.01  # minimum gain of a setting that needs memory, as a share of the step time
_MAX_MEASURED = 300  # maximum number of grids whose minimum memory is estimated exactly


@dataclass
class Least:
    """The minimum memory that a step needs over all grids that do not fit."""

    gib: float
    grid: GridSizes
    exact: bool  # otherwise a lower bound

    def __str__(self) -> str:
        return f"{'at least' if self.exact else 'more than'} {self.gib:.1f} GiB"


@dataclass
class Ranking:
    """Plans, best first, and the reasons why further grids are missing."""

    plans: list[Plan] = field(default_factory=list)
    fitting: int = 0  # number of grids that fit; ``plans`` are the best of them
    impossible: int = 0  # number of grids that the model or the batch cannot be split over
    problem: str | None = None  # why the first impossible grid is impossible
    pruned: int = 0  # number of grids and pipelines without a full estimate
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # grids that do not fit, and the GiB they need
    # Functions that return the exact GiB of a grid for which ``too_large`` has a lower bound.
    exact: dict[GridSizes, Callable[[], float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # settings that need the minimum memory

    def least(self) -> Least:
        """Return the minimum over the grids that do not fit. It is a lower bound if there are too many grids."""
        for _ in range(_MAX_MEASURED):
            sizes, needed = min(self.too_large.items(), key=lambda item: item[1])
            if sizes not in self.exact:
                break
            self.too_large[sizes] = self.exact.pop(sizes)()
        else:
            sizes, needed = min(self.too_large.items(), key=lambda item: item[1])
        return Least(needed, sizes, sizes not in self.exact)

    def check(self, config: Config, devices: int) -> None:
        """Raise ConfigError, with remedies, if there is no plan."""
        if self.plans:
            return
        if not self.too_large:
            raise ConfigError(f"no grid of {devices} device(s) is possible; the first: {self.problem}")
        least, cluster = self.least(), for_devices(config.cluster, devices)
        shared = cluster.host_gib is not None and len(cluster.levels) == 1
        remedies = ["a machine with more memory (cluster=NAME)" if shared else "more devices"]
        remedies += as_overrides(_untried(config, least.grid, self.options))
        *others, last = remedies
        remedy = f"{', '.join(others)} or {last}" if others else last
        settings = " ".join(as_overrides(self.options))
        raise ConfigError(
            f"cluster.memory_gib={total_gib(cluster):.4g}: on {devices} device(s), a step needs {least} of each "
            f"(grid {least.grid}{f' with {settings}' if settings else ''}), and {usable_gib(cluster):.4g} may be used "
            f"(cluster.margin={cluster.margin:g}); use {remedy}"
        )


def _untried(config: Config, sizes: GridSizes, options: dict[str, Any]) -> dict[str, Any]:
    """Return settings that save memory on a grid and that the search has not tried."""
    smallest = levels(config, [key for key in KEYS if key not in options])[-1]
    found = {key: value for key, value in smallest.options.items() if value_of(config, key) != value}
    if sizes.data == 1:
        found.pop("optim.shard_states", None)
    if config.train.micro_batch_size not in (None, 1):
        found["train.micro_batch_size"] = 1
    return found


def rank(config: Config, devices: int, top: int | None = None, cost: str = "ours", keys: Sequence[str] = ()) -> Ranking:
    """Rank the grids and pipelines of ``devices`` devices that can train ``config``, fastest step first.

    Args:
        config: the configuration; its grid sizes are ignored.
        devices: the number of devices.
        top: maximum number of plans; None for all.
        cost: ``ours`` compares the predicted time of a step, ``aware`` and ``agnostic`` the seconds of communication of
            the 4D paper's models.
        keys: options that the planner may choose in addition (gpt4d.planner.options).

    Raises ConfigError if the cluster has fewer devices.
    """
    check_machine(config.cluster, devices)
    config = replace(config, cluster=for_devices(config.cluster, devices))
    choices = levels(config, keys)
    ranking = _rank_grids(choices, devices, top, cost) if may_have_one_stage(config) else Ranking()
    ranking.options = dict(choices[-1].options)
    if cost == "ours" and may_have_stages(config):
        found = pipelines.rank(choices, devices, [plan.step_time_s for plan in ranking.plans], top)
        ranking.pruned += found.pruned
        ranking.problem = ranking.problem or found.problem
        ranking.fitting += len(found.plans)
        ranking.too_large |= found.too_large
        ranking.exact |= found.exact
        ranking.plans = sorted(ranking.plans + found.plans, key=lambda plan: plan.step_time_s)[:top]
    ranking.plans = [_with_explicit_cache(plan, config) for plan in ranking.plans]
    return ranking


def _with_explicit_cache(plan: Plan, config: Config) -> Plan:
    """Return the plan with an explicit ``parallel.cache_layers=0`` if a run on its grids resolves the key itself."""
    kept = config.parallel.cache_layers is not None or "cache_layers" in plan.choice
    if kept or not all(converts_weights(config, sizes) for sizes in plan.stages or (plan.sizes,)):
        return plan
    return replace(plan, choice={**plan.choice, "cache_layers": 0})


def _rank_grids(choices: list[Level], devices: int, top: int | None, cost: str) -> Ranking:
    """Rank the grids on which one stage has the full model."""
    ranking = Ranking()
    config, description = choices[0].config, choices[0].description
    memory = usable_gib(config.cluster)
    possible: list[GridSizes] = []
    contexts = {sizes: possible_contexts(choices[-1].config, description.rules, sizes) for sizes in grids(devices)}
    for sizes, found in contexts.items():
        if not found:
            ranking.impossible += 1
            ranking.problem = ranking.problem or grid_problem(description.rules, config.train, config.parallel, sizes)
        elif (bound := estimate_of(choices[-1].sharing(found[0]), sizes).bound_gib()) > memory:
            ranking.too_large[sizes] = bound
            ranking.exact[sizes] = partial(least_gib, choices[-1].sharing(found[-1]), sizes)
        else:
            possible.append(sizes)
    busy: dict[GridSizes, float] = {}
    if cost == "ours":
        busy = {sizes: paper_models.busy_s(config, description, sizes) for sizes in possible}
        possible.sort(key=busy.__getitem__)
    quick: dict[GridSizes, float] = {}
    candidates: dict[GridSizes, list[tuple[Estimate, int]]] = {}
    for sizes in possible:
        if cost == "ours" and top is not None and len(quick) >= top + _FURTHER:
            slowest = sorted(quick.values())[top + _FURTHER - 1]
            if (
                _LEAST_BUSY * busy[sizes] >= slowest
                or _bound_s(choices[0].sharing(contexts[sizes][0]), sizes) >= slowest
            ):
                ranking.pruned += 1
                continue
        fastest, needed = _fastest_contexts(choices, sizes, cost, contexts[sizes])
        if not fastest:
            ranking.too_large[sizes] = needed
            continue
        candidates[sizes] = fastest
        if cost == "ours":
            candidates[sizes] = [(_faster_order(estimate, size), size) for estimate, size in fastest]
            quick[sizes] = min(estimate.quick_s(micro_batch) for estimate, micro_batch in candidates[sizes])
        else:
            quick[sizes] = sum(paper_models.communication(config, description, sizes, cost == "aware").values())
    ranking.fitting = len(candidates)
    order = sorted(candidates, key=quick.__getitem__)
    estimated = [candidates[sizes] for sizes in order[: top and (top + _FURTHER if cost == "ours" else top)]]
    ranking.plans = [
        min((estimate.plan(micro_batch) for estimate, micro_batch in found), key=lambda plan: plan.step_time_s)
        for found in estimated
    ]
    if cost == "ours":
        ranking.plans.sort(key=lambda plan: plan.step_time_s)
        split = (
            lambda sizes: sizes.z > 1,
            lambda sizes: sizes.x * sizes.y > 1,
            lambda sizes: sizes.data == sizes.devices and converts_weights(config, sizes),
            lambda sizes: sizes.data > 1 and "optim.shard_states" in choices[-1].options,
        )
        places = [[n for n, plan in enumerate(ranking.plans) if test(plan.sizes)][:_NUM_IMPROVED] for test in split]
        fastest_s = ranking.plans[0].step_time_s if ranking.plans else 0.0
        for place in set().union(*places):
            plan = ranking.plans[place]
            if top is None or plan.step_time_s - plan.exposed_s < fastest_s or RECOMPUTATION in plan.options:
                ranking.plans[place] = _improve(plan, choices)
        ranking.plans.sort(key=lambda plan: plan.step_time_s)
    else:
        ranking.plans = [replace(plan, published_s=quick[plan.sizes]) for plan in ranking.plans]
    ranking.plans = [with_fewer_options(plan, choices) for plan in ranking.plans[:top]]
    ranking.plans.sort(key=lambda plan: plan.step_time_s if plan.published_s is None else plan.published_s)
    return ranking


def _bound_s(level: Level, sizes: GridSizes) -> float:
    """Return the seconds of a step on a grid with the largest microbatch, whether it fits or not."""
    largest = micro_batch_sizes(level.config, sizes)[0]
    return _faster_order(estimate_of(level, sizes), largest).quick_s(largest)


def _fastest_contexts(
    choices: list[Level], sizes: GridSizes, cost: str, contexts: list[int]
) -> tuple[list[tuple[Estimate, int]], float]:
    """Return ``_fastest_levels`` for the fewest ranks that share samples with which a step fits.

    If none fits, return an empty list and the minimum memory in GiB. ``contexts``: possible numbers, ascending.
    """
    memory = usable_gib(choices[0].config.cluster)
    for context in contexts:
        if fastest := _fastest_levels([level.sharing(context) for level in choices], sizes, cost):
            return fastest, 0.0
        if context == contexts[0] and (needed := least_gib(choices[-1].sharing(contexts[-1]), sizes)) > memory:
            break
    return [], needed


def _fastest_levels(choices: list[Level], sizes: GridSizes, cost: str) -> list[tuple[Estimate, int]]:
    """Return estimates that may be fastest on a grid, each with its largest microbatch, fewest options first.

    Options are useful because they allow a larger microbatch. So a level is skipped if it cannot be faster with the
    largest microbatch, or if its computation alone takes longer than the fastest step. The list is empty if no level
    fits.
    """
    fewest: tuple[Estimate, int] | None = None
    best: tuple[Estimate, int] | None = None
    plain: Estimate | None = None
    largest = micro_batch_sizes(choices[0].config, sizes)[0]
    for choice in choices:
        if best and plain:
            limit_s = (1 - _LEAST_GAIN) * best[0].quick_s(best[1])
            if plain.quick_s(largest) >= limit_s:
                break
            if compute_s(choice.config, choice.description, sizes.devices) >= limit_s:
                continue
        smaller = best[1] if best else 0
        if cost == "ours":
            estimate, micro_batch = with_larger_micro_batch(choice, sizes, smaller)
        else:
            estimate = estimate_of(choice, sizes)
            micro_batch, _ = largest_micro_batch(estimate, smaller)
        plain = plain or estimate
        if micro_batch is None:
            continue
        fewest = fewest or (estimate, micro_batch)
        if best is None or estimate.quick_s(micro_batch) < best[0].quick_s(best[1]):
            best = estimate, micro_batch
        if micro_batch == largest:
            break
    return [found for found in dict.fromkeys((fewest, best)) if found]


def with_fewer_options(plan: Plan, choices: list[Level]) -> Plan:
    """Return the plan without options that it needs neither for its microbatch nor for speed."""
    for key in plan.options:
        estimate = estimate_of(choices[0].with_options(plan.options).without(key), plan.sizes, plan.choice)
        if estimate.memory_gib(plan.micro_batch) <= usable_gib(estimate.config.cluster):
            other = estimate.plan(plan.micro_batch)
            if other.step_time_s <= plan.step_time_s * (1 + _LEAST_GAIN / 10):
                plan = other
    return plan


def _faster_order(estimate: Estimate, micro_batch: int) -> Estimate:
    """Return the estimate for the faster order of ranks. If both are equally fast, it is xy."""
    config, sizes = estimate.config, estimate.sizes
    if config.parallel.rank_order is None and sizes.x > 1 and sizes.y > 1:
        choice = {**estimate.choice, "rank_order": "yx"}
        other = Estimate(config, sizes, estimate.description, choice, estimate.options)
        return min(estimate, other, key=lambda estimate: estimate.quick_s(micro_batch))
    return estimate


def _improve(plan: Plan, choices: list[Level]) -> Plan:
    """Return the plan with settings, tried sequentially, that make its step faster and still fit."""
    if plan.micro_batch == 1 and RECOMPUTATION in plan.options:
        plan = _with_shorter_parts(plan, choices)
    if plan.sizes.data > 1 and "optim.shard_states" in choices[-1].options and "optim.shard_states" not in plan.options:
        options = {"optim.shard_states": True, **plan.options}
        plan = _fastest(plan, [estimate_of(choices[0].with_options(options), plan.sizes, plan.choice)])
    level = choices[0].with_options(plan.options).sharing(plan.context)
    for alternatives in _settings(plan, level.config, len(level.description.blocks)):
        plan = _fastest(plan, [estimate_of(level, plan.sizes, {**plan.choice, **new}) for new in alternatives])
    return plan


def _with_shorter_parts(plan: Plan, choices: list[Level]) -> Plan:
    """Return the plan with more ranks that share samples, if that saves recomputation and makes the step faster."""
    contexts = possible_contexts(choices[-1].config, choices[-1].description.rules, plan.sizes)
    found: list[tuple[Estimate, int]] = []
    for context in contexts:
        if context > plan.context:
            fastest = _fastest_levels([level.sharing(context) for level in choices], plan.sizes, "ours")
            found += fastest
            if any(RECOMPUTATION not in estimate.options for estimate, _ in fastest):
                break
    if not found:
        return plan
    estimate, micro_batch = min(found, key=lambda one: one[0].quick_s(one[1]))
    other = _faster_order(estimate, micro_batch).plan(micro_batch)
    return other if other.step_time_s < (1 - _LEAST_GAIN) * plan.step_time_s else plan


def _fastest(plan: Plan, estimates: list[Estimate]) -> Plan:
    """Return the fastest plan among ``estimates`` that fits and gains enough over ``plan``; otherwise ``plan``."""
    best = plan
    for estimate in estimates:
        micro_batch = largest_micro_batch(estimate)[0]
        if micro_batch is None:
            continue
        other = estimate.plan(micro_batch)
        if other.step_time_s < min(best.step_time_s, (1 - _LEAST_GAIN) * plan.step_time_s):
            best = other
    return best


def _settings(plan: Plan, config: Config, blocks: int) -> Iterator[list[dict[str, Any]]]:
    """Yield alternatives to try for a grid. Settings of the configuration are fixed."""
    parallel, sizes = config.parallel, plan.sizes
    if parallel.replicated_layers == 0 and sizes.z > 1:
        counts = sorted({eighths * blocks // 8 for eighths in (1, 2, 3, 4)} - {0})
        yield [{"replicated_layers": count} for count in counts]
    # Cached weights are gathered, and converted, less often.
    cached = {"cache_layers": parallel.cache_layers or "all"}
    if parallel.cache_layers != 0 and (sizes.z > 1 or converts_weights(config, sizes)):
        if parallel.cache_scope is None and plan.share > plan.micro_batch:
            yield [{**cached, "cache_scope": "step"}]
        elif parallel.cache_layers is None and sizes.z == 1:
            yield [cached]
    if plan.context > 1 and parallel.context_exchange is None and _may_use_ring(config):
        yield [{"context_exchange": "ring"}]
    if may_split_tokens(config, sizes) and "sequence_parallel" not in plan.choice:
        yield [{"sequence_parallel": True}]
    if parallel.chunks == 1 and sizes.x * sizes.y > 1:
        yield [{"chunks": count} for count in (2, 4)]


def _may_use_ring(config: Config) -> bool:
    """Return whether the model's family allows ``parallel.context_exchange=ring``."""
    parallel = replace(config.parallel, context_exchange="ring")
    try:
        registry.of(config.model).check(replace(config, parallel=parallel))
    except ConfigError:
        return False
    return True


def converts_weights(config: Config, sizes: GridSizes) -> bool:
    """Return whether master weights are converted to the compute dtype without a gather, so that caching them pays."""
    return sizes.z == 1 and compute_bytes(config) < MASTER_BYTES and config.model.lora is None


def check_open(parallel: ParallelConfig, remedy: str = "leave it out") -> None:
    """Raise ConfigError with this remedy if a size of the grid is set, because the planner chooses all sizes."""
    for key, default in (("gx", 1), ("gy", 1), ("gz", 1), ("gdata", None)):
        if getattr(parallel, key) != default:
            raise ConfigError(f"parallel.{key}={getattr(parallel, key)}: the planner chooses the grid; {remedy}")
    if (grids := parallel.pipeline.stage_grids) is not None:
        raise ConfigError(f"parallel.pipeline.stage_grids={grids}: the planner chooses the grids; {remedy}")
