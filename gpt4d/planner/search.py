"""Ranking of the plans of a configuration: the fastest candidates, estimated in full and improved.

A quick estimate orders all candidates. The search finds the fastest steps of each one that fits in memory, until no
other one can be among the best. Settings that make the best plans faster are then tried sequentially.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gpt4d.config import GRID_KEYS, Config, ConfigError, GridSizes, ParallelConfig, possible_microbatches, with_stages
from gpt4d.planner.candidates import (
    LEAST_GAIN,
    MICROBATCHES,
    Candidate,
    Ranking,
    Search,
    check_machine,
    fewest_microbatches,
    may_split_tokens,
    microbatch_numbers,
)
from gpt4d.planner.options import RECOMPUTATION, Level, is_allowed, levels, with_settings
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import paper_bandwidths
from gpt4d.planner.workload import (
    all_reduced_bytes,
    compute_s,
    converts_weights,
    possible_contexts,
    product_tflops,
    step_flops,
)

_FURTHER = 5  # number of candidates beyond ``top`` that are estimated in full: the quick estimate may misorder them
_LEAST_BUSY = 0.6  # minimum share of ``_busy_s`` that a step takes, because its all-reduces overlap with computation
_NUM_PIPELINES = 8  # number of pipelines that are searched, if they may be faster than every single stage
_NUM_IMPROVED = 3  # number of fastest plans of each kind (gather, all-reduce, convert, pipeline) that are improved
_SCHEDULES = ("1f1b", "eager_1f1b_w", "zb_h1")  # candidates in addition to the default
_OTHER_GRIDS = 4  # number of candidate grids for the first and for the last stage


def rank(config: Config, devices: int, top: int | None = None, keys: Sequence[str] = ()) -> Ranking:
    """Rank the grids and pipelines of ``devices`` devices that can train ``config``, fastest step first.

    Args:
        config: the configuration; its grid sizes are ignored.
        devices: the number of devices.
        top: maximum number of plans; None for all.
        keys: options that the planner may choose in addition (gpt4d.planner.options).

    Raises ConfigError if the cluster has fewer devices.
    """
    check_machine(config.cluster, devices)
    search = Search(levels(config, keys), devices)
    search.ranking.plans = _by_time(search, top)
    return search.ranking


def _by_time(search: Search, top: int | None) -> list[PlanEstimate]:
    """Return the best ``top`` plans, fastest step first. The seconds of single stages limit the search of pipelines."""
    busy = {candidate: _busy_s(search, candidate) for candidate in search.candidates()}
    order = sorted(busy, key=busy.__getitem__)
    grids = _steps_of_grids(search, [one for one in order if len(one.stages) == 1], busy, top)
    plans = _improved_grids(search, [_fastest_plan(steps) for steps in grids], top)
    pipelines = {one: busy[one] for one in order if len(one.stages) > 1}
    plans += _improved_pipelines(search, pipelines, [plan.step_time_s for plan in plans], top)
    plans = sorted(plans, key=lambda plan: plan.step_time_s)[:top]
    return sorted((with_fewer_options(search, plan) for plan in plans), key=lambda plan: plan.step_time_s)


def _steps_of_grids(
    search: Search, candidates: list[Candidate], busy: dict[Candidate, float], top: int | None
) -> list[list[PlanEstimate]]:
    """Return the steps of the fastest grids of a single stage, by their quick estimates, each in its faster order."""
    enough = None if top is None else top + _FURTHER
    found: list[tuple[float, list[PlanEstimate]]] = []
    for candidate in candidates:
        if enough and len(found) >= enough:
            slowest_s = sorted(seconds for seconds, _ in found)[enough - 1]
            if _LEAST_BUSY * busy[candidate] >= slowest_s or _least_s(search, candidate) >= slowest_s:
                search.ranking.pruned += 1
                continue
        if steps := [_faster_order(search, step) for step in search.steps(candidate)]:
            found.append((min(step.quick_s for step in steps), steps))
    search.ranking.fitting += len(found)
    return [steps for _, steps in sorted(found, key=lambda one: one[0])[:enough]]


def _improved_pipelines(
    search: Search, candidates: dict[Candidate, float], single_s: list[float], top: int | None
) -> list[PlanEstimate]:
    """Return the pipelines that may be among the best, improved if they may be the fastest, fastest step first.

    ``candidates``: their seconds by ``_busy_s``, ascending; ``single_s``: the seconds of the plans without stages.
    """
    plans: list[PlanEstimate] = []
    fastest_s = min(single_s, default=math.inf)
    limit_s = sorted(single_s)[top - 1] if top and len(single_s) >= top else math.inf
    for number, (candidate, busy_s) in enumerate(candidates.items()):
        enough = _NUM_PIPELINES if busy_s < fastest_s or top is None else _NUM_IMPROVED
        if len(plans) >= enough or busy_s >= limit_s:
            search.ranking.pruned += len(candidates) - number
            break
        if steps := search.steps(candidate):
            plans.append(_fastest_plan(steps))
    search.ranking.fitting += len(plans)
    plans.sort(key=lambda plan: plan.step_time_s)
    grids = [candidate.stages[0] for candidate in candidates]
    for place, plan in enumerate(plans[:_NUM_IMPROVED]):
        if top is None or plan.step_time_s - plan.idle_s < fastest_s:
            plans[place] = _with_other_stages(search, plan, grids, place == 0)
    return plans


def _fastest_plan(steps: Sequence[PlanEstimate]) -> PlanEstimate:
    return min(steps, key=lambda step: step.step_time_s)


def _busy_s(search: Search, candidate: Candidate) -> float:
    """Return the seconds of a step for computation, all-reduces of outputs without overlap, and idle time.

    The links have the bandwidths of the 4D paper. Without ``parallel.rank_order``, the ranks have the faster order.
    """
    stages, level = candidate.stages, search.choices[-1].choosing(context=candidate.contexts[0])
    idle = (len(stages) - 1) / microbatch_numbers(level, stages)[-1]
    config, description, sizes = search.config, search.choices[0].description, stages[0]
    given, sent = config.parallel.rank_order, all_reduced_bytes(config, description, sizes)
    bandwidths = [
        paper_bandwidths(config.cluster, sizes, order)
        for order in ([given] if given or 1 in (sizes.x, sizes.y) else ["xy", "yx"])
    ]
    busy_s = step_flops(config, description) / sizes.devices / (product_tflops(config) * 1e12) + min(
        sent["x"] / 1e9 / gb_s["x"] + sent["y"] / 1e9 / gb_s["y"] for gb_s in bandwidths
    )
    return (1 + idle) * busy_s / len(stages)


def _least_s(search: Search, candidate: Candidate) -> float:
    """Return the seconds of a step of a single stage with the fewest microbatches, whether it fits or not."""
    level = search.choices[0].choosing(context=candidate.contexts[0])
    step = level.step(candidate.stages, microbatch_numbers(level, candidate.stages)[0])
    return _faster_order(search, step).quick_s


def _faster_order(search: Search, step: PlanEstimate) -> PlanEstimate:
    """Return the step of a single stage in the faster order of ranks. If both are equally fast, it is xy."""
    if step.config.parallel.rank_order is None and step.sizes.x > 1 and step.sizes.y > 1:
        other = search.level_of(step).choosing(rank_order="yx").step(step.grids, step.microbatches)
        return min(step, other, key=lambda step: step.quick_s)
    return step


# ----------------------------------------------------------------------------------------------------- improvements


def _improved_grids(search: Search, plans: list[PlanEstimate], top: int | None) -> list[PlanEstimate]:
    """Return the plans without stages, improved where that may change the best ``top``, fastest step first."""
    plans = sorted(plans, key=lambda plan: plan.step_time_s)
    kinds = (
        lambda sizes: sizes.z > 1,
        lambda sizes: sizes.x * sizes.y > 1,
        lambda sizes: sizes.data == sizes.devices and converts_weights(search.config, sizes),
        lambda sizes: sizes.data > 1 and "optim.shard_states" in search.choices[-1].options,
    )
    places = [[n for n, plan in enumerate(plans) if kind(plan.sizes)][:_NUM_IMPROVED] for kind in kinds]
    fastest_s = min((plan.step_time_s for plan in plans), default=0.0)
    for place in set().union(*places):
        plan = plans[place]
        if top is None or plan.step_time_s - plan.slowest.exposed_s < fastest_s or RECOMPUTATION in plan.options:
            plans[place] = _with_settings(search, plan)
    return sorted(plans, key=lambda plan: plan.step_time_s)


def with_fewer_options(search: Search, plan: PlanEstimate) -> PlanEstimate:
    """Return the plan without options that it needs neither for its microbatches nor for speed."""
    pipeline = plan.config.parallel.pipeline
    for key in plan.options:
        level = search.level_of(plan).without(key)
        step = level.step(plan.grids, plan.microbatches, pipeline.schedule, pipeline.chunks_per_stage)
        if search.fits(step) and step.step_time_s <= plan.step_time_s * (1 + LEAST_GAIN / 10):
            plan = step
    return plan


def _with_settings(search: Search, plan: PlanEstimate) -> PlanEstimate:
    """Return the plan of a single stage with settings, tried sequentially, that make its step faster and still fit."""
    if plan.micro_batch == 1 and RECOMPUTATION in plan.options:
        plan = _with_shorter_parts(search, plan)
    shards = "optim.shard_states"
    if plan.sizes.data > 1 and shards in search.choices[-1].options and shards not in plan.options:
        options = {shards: True, **plan.options}
        plan = _fastest(plan, [search.choices[0].with_options(options).choosing(**plan.choice)])
    level = search.level_of(plan)
    for alternatives in _settings(plan, level.config, len(level.description.blocks)):
        plan = _fastest(plan, [search.level_of(plan).choosing(**new) for new in alternatives])
    return plan


def _with_shorter_parts(search: Search, plan: PlanEstimate) -> PlanEstimate:
    """Return the plan with more ranks that share samples, if that saves recomputation and makes the step faster."""
    smallest, found = search.choices[-1], list[PlanEstimate]()
    for context in possible_contexts(smallest.config, smallest.description.rules, plan.sizes):
        if context > plan.config.parallel.context:
            fastest = search.fastest((plan.sizes,), context)
            found += fastest
            if any(RECOMPUTATION not in step.options for step in fastest):
                break
    if not found:
        return plan
    other = _faster_order(search, min(found, key=lambda step: step.quick_s))
    return other if other.step_time_s < (1 - LEAST_GAIN) * plan.step_time_s else plan


def _fastest(plan: PlanEstimate, levels: Sequence[Level]) -> PlanEstimate:
    """Return the fastest plan on the same grid with one of ``levels``, if it gains enough; otherwise ``plan``."""
    best = plan
    for level in levels:
        step = fewest_microbatches(level, plan.grids)
        if step and step.step_time_s < min(best.step_time_s, (1 - LEAST_GAIN) * plan.step_time_s):
            best = step
    return best


def _settings(plan: PlanEstimate, config: Config, blocks: int) -> Iterator[list[dict[str, Any]]]:
    """Yield alternatives to try for a grid. Settings of the configuration are fixed."""
    parallel, sizes = config.parallel, plan.sizes
    if parallel.replicated_layers == 0 and sizes.z > 1:
        counts = sorted({eighths * blocks // 8 for eighths in (1, 2, 3, 4)} - {0})
        yield [{"replicated_layers": count} for count in counts]
    # Cached weights are gathered, and converted, less often.
    cached = {"cache_layers": parallel.cache_layers or "all"}
    if parallel.cache_layers != 0 and (sizes.z > 1 or converts_weights(config, sizes)):
        if parallel.cache_scope is None and plan.microbatches > 1:
            yield [{**cached, "cache_scope": "step"}]
        elif parallel.cache_layers is None and sizes.z == 1:
            yield [cached]
    ring = with_settings(config, {"parallel.context_exchange": "ring"})
    if parallel.context > 1 and parallel.context_exchange is None and is_allowed(ring):
        yield [{"context_exchange": "ring"}]
    if may_split_tokens(config, sizes) and "sequence_parallel" not in plan.choice:
        yield [{"sequence_parallel": True}]
    if parallel.chunks == 1 and sizes.x * sizes.y > 1:
        yield [{"chunks": count} for count in (2, 4)]


def _with_other_stages(search: Search, plan: PlanEstimate, grids: Sequence[GridSizes], further: bool) -> PlanEstimate:
    """Return the pipeline with changes that make it faster and still fit.

    The candidates are other numbers of microbatches, other schedules, and other grids of the first and last stage.
    ``further``: also try more options, which may free the memory for a faster schedule.
    """
    options = [level.options for level in search.choices]
    first = options.index(plan.options)
    for added in options[first:] if further else options[first : first + 1]:
        level = search.choices[0].with_options(added).choosing(**plan.choice)
        if compute_s(level.config, level.description, search.devices) < plan.step_time_s:
            plan = _with_other_number(search, level, plan)
            for alternatives in (_other_schedules(level, plan), _other_grids(level, plan, grids)):
                if faster := search.faster(alternatives, (1 - LEAST_GAIN) * plan.step_time_s):
                    plan = faster
    return plan


def _with_other_number(search: Search, level: Level, plan: PlanEstimate) -> PlanEstimate:
    """Return the plan with more or fewer microbatches, as long as each next possible number is faster."""
    config = with_stages(level.config, len(plan.stages))
    if config.parallel.pipeline.microbatches is not None:
        return plan
    given, most = plan.microbatches, MICROBATCHES[-1] * len(plan.stages)
    possible = possible_microbatches(config.train, config.parallel, plan.grids)
    best, limit_s = plan, (1 - LEAST_GAIN) * plan.step_time_s
    for numbers in ([n for n in possible[::-1] if n < given], [n for n in possible if given < n <= most]):
        for number in numbers:
            faster = search.faster([level.step(plan.grids, number)], limit_s)
            if not faster:
                break
            best, limit_s = faster, faster.quick_s
    return best


def _other_schedules(level: Level, plan: PlanEstimate) -> Iterator[PlanEstimate]:
    microbatches, stages = plan.microbatches, len(plan.stages)
    if level.config.parallel.pipeline.schedule is not None:
        return
    for schedule in _SCHEDULES:
        yield level.step(plan.grids, microbatches, schedule)
    if microbatches % stages == 0 and 2 * stages <= len(level.description.blocks):
        yield level.step(plan.grids, microbatches, "interleaved_1f1b", chunks=2)


def _other_grids(level: Level, plan: PlanEstimate, grids: Sequence[GridSizes]) -> Iterator[PlanEstimate]:
    parallel, pipeline = with_stages(level.config, len(plan.stages)).parallel, plan.config.parallel.pipeline
    alike = [sizes for sizes in dict.fromkeys(grids) if sizes.devices == plan.sizes.devices and sizes != plan.sizes]
    for sizes in alike[:_OTHER_GRIDS]:
        if parallel.context > 1 and sizes.batch_shards != plan.sizes.batch_shards:
            continue  # the ranks that share samples are the same in all stages
        for changed in ((sizes, *plan.grids[1:]), (*plan.grids[:-1], sizes)):
            if plan.microbatches in possible_microbatches(level.config.train, parallel, changed):
                yield level.step(changed, plan.microbatches, pipeline.schedule, pipeline.chunks_per_stage)


def check_open(parallel: ParallelConfig, remedy: str = "leave it out") -> None:
    """Raise ConfigError with this remedy if a size of the grid is set, because the planner chooses all sizes."""
    for key in GRID_KEYS:
        if (size := getattr(parallel, key)) != getattr(ParallelConfig, key):
            raise ConfigError(f"parallel.{key}={size}: the planner chooses the grid; {remedy}")
    if (grids := parallel.pipeline.stage_grids) is not None:
        raise ConfigError(f"parallel.pipeline.stage_grids={grids}: the planner chooses the grids; {remedy}")
