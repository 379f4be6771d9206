"""Search for the best pipelines of a configuration: stages, their grids, microbatches and schedule."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

from gpt4d.config import Config, GridSizes, divisors, grid_problem, possible_microbatches, shortened, with_stages
from gpt4d.parallel.stage_plan import consecutive_stages
from gpt4d.planner import paper_models
from gpt4d.planner.estimate import GIB, Plan
from gpt4d.planner.options import Level
from gpt4d.planner.stages import PipelineEstimate, stage_parts
from gpt4d.planner.topology import reserved_gib, usable_gib
from gpt4d.planner.workload import compute_bytes, compute_s, grids, possible_contexts, training_state

_NUM_ESTIMATED = 8  # number of pipelines that are estimated in full, after the quick estimate
_NUM_IMPROVED = 3  # number of fastest pipelines that are tried with other microbatches, schedules and grids
_MICROBATCHES = (1, 4, 16)  # candidates, per stage
_SCHEDULES = ("1f1b", "eager_1f1b_w", "zb_h1")  # candidates in addition to the default
_SMALLEST_SCHEDULE = "1f1b"  # has the minimum number of microbatches in flight
_OTHER_GRIDS = 4  # number of candidate grids for the first and for the last stage
_LEAST_GAIN = 0.01  # minimum gain of another schedule or grid, as a share of the step time


@dataclass
class PipelineRanking:
    """Pipelines, best first, and the numbers and reasons of rejected pipelines."""

    plans: list[Plan] = field(default_factory=list)
    pruned: int = 0  # number of pipelines without a full estimate
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # grids of stages that do not fit, and their GiB
    exact: dict[GridSizes, Callable[[], float]] = field(
        default_factory=dict
    )  # exact GiB where ``too_large`` has a lower bound
    problem: str | None = None  # why the first impossible pipeline is impossible


class _Candidate(NamedTuple):
    seconds: float  # by the quick estimate
    stages: int
    sizes: GridSizes
    contexts: tuple[int, ...]  # possible numbers of ranks that share samples, ascending


def rank(
    choices: Sequence[Level], devices: int, single_s: Sequence[float] = (), top: int | None = None
) -> PipelineRanking:
    """Rank pipelines on ``devices`` devices. Values that ``config.parallel.pipeline`` sets are fixed.

    A quick estimate compares every number of stages with every grid. It covers computation, idle time and, by the 4D
    paper's model, all-reduces of outputs. The best few are simulated.

    Args:
        choices: the levels that may be chosen.
        devices: the number of devices.
        single_s: seconds of a step of the plans without stages, ascending.
        top: number of plans that the caller needs, of both kinds; None for all.
    """
    ranking = PipelineRanking()
    best_s, limit_s = min(single_s, default=math.inf), math.inf
    if top is not None and len(single_s) >= top:
        limit_s = single_s[top - 1]

    @cache
    def searches_of(context: int) -> list[Search]:
        return [Search(choice.sharing(context)) for choice in choices]

    candidates = sorted(_candidates(choices[-1], devices, ranking))
    for estimated, candidate in enumerate(candidates):
        enough = _NUM_ESTIMATED if top is None or candidate.seconds < best_s else _NUM_IMPROVED
        if len(ranking.plans) >= enough or candidate.seconds >= limit_s:
            ranking.pruned = len(candidates) - estimated
            break
        sizes, contexts = (candidate.sizes,) * candidate.stages, candidate.contexts
        fastest, needed = _fastest(searches_of(contexts[0]), sizes)
        if not fastest and len(contexts) > 1:
            needed = searches_of(contexts[-1])[-1].least_gib(sizes)
            further = contexts[1:] if needed <= usable_gib(choices[0].config.cluster) else ()
            fastest = next(filter(None, (_fastest(searches_of(context), sizes)[0] for context in further)), None)
        if fastest:
            ranking.plans.append(fastest)
        else:
            ranking.too_large[candidate.sizes] = needed
    ranking.plans.sort(key=lambda plan: plan.step_time_s)
    alternatives = [candidate.sizes for candidate in candidates]
    for place, plan in enumerate(ranking.plans[:_NUM_IMPROVED]):
        if top is not None and plan.step_time_s - plan.idle_s >= best_s:
            continue  # even without idle time, the plan is not the fastest
        searches = searches_of(plan.context)
        first = next(n for n, search in enumerate(searches) if search.level.options == plan.options)
        # The fastest pipeline may allow a faster schedule if further options free the memory for it.
        for search in searches[first:] if place == 0 else [searches[first]]:
            if compute_s(search.level.config, search.description, devices) < plan.step_time_s:
                ranking.plans[place] = plan = search.improved(plan, alternatives)
    ranking.plans.sort(key=lambda plan: plan.step_time_s)
    for place, plan in enumerate(ranking.plans[:_NUM_IMPROVED]):
        ranking.plans[place] = _with_fewer_options(plan, searches_of(plan.context))
    return ranking


def _fastest(searches: Sequence["Search"], sizes: tuple[GridSizes, ...]) -> tuple[Plan | None, float]:
    """Return the fastest plan that fits with any options; otherwise None and the minimum memory in GiB.

    Options are useful because they allow fewer microbatches. So numbers that are not faster without them are skipped.
    """
    best: PipelineEstimate | None = None
    chosen, first = searches[0], searches[0]
    numbers = first.numbers(sizes)
    for search in searches:
        if best:
            limit_s = (1 - _LEAST_GAIN) * best.step_time_s
            if compute_s(search.level.config, search.description, math.prod(sizes[0]) * len(sizes)) >= limit_s:
                continue
            numbers = [number for number in numbers if first.estimate(sizes, number).backward_end_s < limit_s]
        if faster := search.faster(search.choices(sizes, numbers), best.step_time_s if best else math.inf):
            best, chosen = faster, search
            numbers = [number for number in numbers if number < best.microbatches]
    if best is None:
        best, chosen = searches[-1].faster([searches[-1].smallest(sizes)], math.inf), searches[-1]
    return (chosen.plan(best), 0.0) if best else (None, searches[-1].least_gib(sizes))


def _with_fewer_options(plan: Plan, searches: Sequence["Search"]) -> Plan:
    """Return the plan without options that it needs neither for memory nor for speed."""
    assert plan.pipeline and plan.pipeline.microbatches
    pipeline = plan.pipeline
    for key in plan.options:
        search = Search(searches[0].level.with_options(plan.options).without(key))
        arguments = plan.stages, plan.pipeline.microbatches, pipeline.schedule, pipeline.chunks_per_stage
        if other := search.faster([search.estimate(*arguments)], plan.step_time_s * (1 + _LEAST_GAIN / 10)):
            plan = search.plan(other)
    return plan


def any_fits(level: Level, devices: int) -> bool:
    """Return whether any pipeline on ``devices`` devices can train this."""
    candidates = _candidates(level, devices, PipelineRanking())
    return any(
        Search(level.sharing(candidate.contexts[-1])).any_fits((candidate.sizes,) * candidate.stages)
        for candidate in candidates
    )


def _candidates(level: Level, devices: int, ranking: PipelineRanking) -> Iterator[_Candidate]:
    """Yield pipelines of equal grids whose training state fits. Record all further pipelines in ``ranking``."""
    config, description = level.config, level.description
    given = config.parallel.pipeline.stages
    counts = [given] if given else [n for n in divisors(devices) if 1 < n <= len(description.blocks)]
    for stages in counts:
        if devices % stages:
            possible = shortened(divisors(devices))
            ranking.problem = (
                f"parallel.pipeline.stages={stages}: does not divide {devices} device(s); use one of {possible}"
            )
            continue
        staged = with_stages(config, stages)
        for sizes in grids(devices // stages):
            grids_of_stages = (sizes,) * stages
            numbers = {
                context: _numbers(replace(staged, parallel=replace(staged.parallel, context=context)), grids_of_stages)
                for context in possible_contexts(staged, description.rules, sizes)
            }
            contexts = tuple(context for context, found in numbers.items() if found)
            if not contexts:
                problem = grid_problem(description.rules, config.train, staged.parallel, sizes) or _no_numbers(staged)
                ranking.problem = ranking.problem or problem
                continue
            state = training_state(level.describe([sizes]), sizes, config.optim, compute_bytes(config))
            needed = reserved_gib(config, sizes, devices, contexts[0]) + sum(state.values()) / stages / GIB
            if needed > usable_gib(config.cluster):
                ranking.too_large[sizes] = needed
                ranking.exact[sizes] = partial(Search(level.sharing(contexts[-1])).least_gib, grids_of_stages)
                continue
            idle = 1 + (stages - 1) / max(numbers[contexts[0]])
            yield _Candidate(idle * paper_models.busy_s(config, description, sizes) / stages, stages, sizes, contexts)


def _no_numbers(config: Config) -> str:
    """Return why no number of microbatches is possible."""
    pipeline, batch = config.parallel.pipeline, config.train.batch_size
    if pipeline.microbatches is not None:
        return f"parallel.pipeline.microbatches={pipeline.microbatches}: does not cut train.batch_size={batch}"
    return f"train.batch_size={batch}: too small for {pipeline.stages} stages"


def _numbers(config: Config, sizes: tuple[GridSizes, ...]) -> list[int]:
    """Return the numbers of microbatches to try: for each multiple of the stages, the largest number up to it."""
    train, parallel = config.train, config.parallel
    possible = possible_microbatches(train, parallel, sizes)
    if parallel.pipeline.microbatches is not None:
        return [n for n in possible if n == parallel.pipeline.microbatches]
    limits = [multiple * len(sizes) for multiple in _MICROBATCHES]
    return sorted({max(n for n in possible if n <= limit) for limit in limits if possible and possible[0] <= limit})


class Search:
    """Plans of one configuration, which share the estimates of equal stages."""

    def __init__(self, level: Level):
        self.level, self._config, self.description = level, level.config, level.description
        self._memory_gib = usable_gib(level.config.cluster)
        self._known: defaultdict[int, dict] = defaultdict(dict)  # by the description's id

    def config(self, sizes: Sequence[GridSizes]) -> Config:
        return with_stages(self._config, len(sizes))

    def estimate(
        self, sizes: tuple[GridSizes, ...], microbatches: int, schedule: str | None = None, chunks: int = 1
    ) -> PipelineEstimate:
        """Return the estimate of a pipeline, by default with the configuration's schedule."""
        config = self.config(sizes)
        pipeline = config.parallel.pipeline
        if schedule is not None:
            pipeline = replace(pipeline, schedule=schedule, chunks_per_stage=chunks)
            config = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        description = self.level.describe(sizes)
        stages = consecutive_stages(sizes, stage_parts(config, description), config.parallel.rank_order)
        return PipelineEstimate(config, description, stages, microbatches, self._known[id(description)])

    def any_fits(self, sizes: tuple[GridSizes, ...]) -> bool:
        """Return whether the pipeline fits with any candidate number of microbatches."""
        return self._fits(self.smallest(sizes))

    def least_gib(self, sizes: tuple[GridSizes, ...]) -> float:
        """Return the minimum memory in GiB over the candidate numbers of microbatches."""
        return self.smallest(sizes).needed_gib(math.inf)

    def smallest(self, sizes: tuple[GridSizes, ...]) -> PipelineEstimate:
        """Return the estimate that needs the minimum memory: the most microbatches with the smallest schedule."""
        schedule = self._config.parallel.pipeline.schedule or _SMALLEST_SCHEDULE
        return self.estimate(sizes, self.numbers(sizes)[-1], schedule)

    def _fits(self, estimate: PipelineEstimate) -> bool:
        return estimate.needed_gib(self._memory_gib) <= self._memory_gib

    def plan(self, estimate: PipelineEstimate) -> Plan:
        """Return the full estimate, with the settings that this search has added."""
        return replace(estimate.plan(), options=self.level.options, choice=self.level.choice)

    def numbers(self, sizes: tuple[GridSizes, ...]) -> list[int]:
        """Return the candidate numbers of microbatches."""
        return _numbers(self.config(sizes), sizes)

    def choices(self, sizes: tuple[GridSizes, ...], numbers: Iterable[int]) -> Iterator[PipelineEstimate]:
        """Yield the estimates for numbers of microbatches."""
        return (self.estimate(sizes, number) for number in numbers)

    def faster(self, estimates: Iterable[PipelineEstimate], limit_s: float) -> PipelineEstimate | None:
        """Return the estimate with the fastest step that fits and takes less than ``limit_s``; None without one."""
        fastest = None
        for estimate in estimates:
            # Evaluate the cheapest estimates first: memory, then the last backward, then the end of the step.
            if self._fits(estimate) and estimate.backward_end_s < limit_s and estimate.step_time_s < limit_s:
                fastest, limit_s = estimate, estimate.step_time_s
        return fastest

    def improved(self, plan: Plan, grids: Sequence[GridSizes]) -> Plan:
        """Return the plan with changes that make it faster and still fit.

        The candidates are other numbers of microbatches, other schedules, and other grids of the first and last stage.
        """
        plan = self._with_other_number(plan)
        for alternatives in (self._other_schedules, partial(self._other_grids, grids)):
            if faster := self.faster(alternatives(plan), (1 - _LEAST_GAIN) * plan.step_time_s):
                plan = self.plan(faster)
        return plan

    def _with_other_number(self, plan: Plan) -> Plan:
        """Return the plan with more or fewer microbatches, as long as each next possible number is faster."""
        assert plan.pipeline and plan.pipeline.microbatches
        if self._config.parallel.pipeline.microbatches is not None:
            return plan
        given, most = plan.pipeline.microbatches, _MICROBATCHES[-1] * len(plan.stages)
        possible = possible_microbatches(self._config.train, self.config(plan.stages).parallel, plan.stages)
        best, limit_s = None, (1 - _LEAST_GAIN) * plan.step_time_s
        for numbers in ([n for n in possible[::-1] if n < given], [n for n in possible if given < n <= most]):
            for number in numbers:
                faster = self.faster([self.estimate(plan.stages, number)], limit_s)
                if not faster:
                    break
                best, limit_s = faster, faster.step_time_s
        return self.plan(best) if best else plan

    def _other_schedules(self, plan: Plan) -> Iterator[PipelineEstimate]:
        assert plan.pipeline and plan.pipeline.microbatches
        microbatches, stages = plan.pipeline.microbatches, len(plan.stages)
        if self._config.parallel.pipeline.schedule is not None:
            return
        for schedule in _SCHEDULES:
            yield self.estimate(plan.stages, microbatches, schedule)
        if microbatches % stages == 0 and 2 * stages <= len(self.description.blocks):
            yield self.estimate(plan.stages, microbatches, "interleaved_1f1b", chunks=2)

    def _other_grids(self, grids: Sequence[GridSizes], plan: Plan) -> Iterator[PipelineEstimate]:
        assert plan.pipeline and plan.pipeline.microbatches
        alike = [sizes for sizes in dict.fromkeys(grids) if sizes.devices == plan.sizes.devices and sizes != plan.sizes]
        for sizes in alike[:_OTHER_GRIDS]:
            if plan.context > 1 and sizes.batch_shards != plan.sizes.batch_shards:
                continue  # the ranks that share samples are the same in all stages
            for changed in ((sizes, *plan.stages[1:]), (*plan.stages[:-1], sizes)):
                microbatches = plan.pipeline.microbatches
                if microbatches in possible_microbatches(self._config.train, self.config(changed).parallel, changed):
                    yield self.estimate(changed, microbatches, plan.pipeline.schedule, plan.pipeline.chunks_per_stage)
