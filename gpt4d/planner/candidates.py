"""Candidates of the planner's search: numbers of stages and grids, and the fastest step of each one that fits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from gpt4d.config import (
    ClusterConfig,
    Config,
    ConfigError,
    GridSizes,
    divisors,
    grid_problem,
    possible_microbatches,
    shortened,
    value_of,
    with_stages,
)
from gpt4d.config.fields import as_overrides
from gpt4d.planner.estimate import GIB
from gpt4d.planner.options import KEYS, Level, levels
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import for_devices, reserved_gib, total_gib, usable_gib
from gpt4d.planner.workload import (
    compute_bytes,
    compute_s,
    grids,
    micro_batch_sizes,
    possible_contexts,
    training_state,
)

MAX_DEVICES = 4096  # upper limit of the search for the minimum number of devices
LEAST_GAIN = 0.01  # minimum gain of a setting that needs memory, as a share of the step time
MICROBATCHES = (1, 4, 16)  # candidates of a pipeline, per stage
_MAX_MEASURED = 300  # maximum number of candidates whose minimum memory is estimated exactly
_SMALLEST_SCHEDULE = "1f1b"  # has the minimum number of microbatches in flight


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
    """Plans, best first, and the reasons why other grids are missing."""

    plans: list[PlanEstimate] = field(default_factory=list)
    fitting: int = 0  # number of candidates that fit; ``plans`` are the best of them
    impossible: int = 0  # number of grids that the model or the batch cannot be split over
    problem: str | None = None  # why the first impossible candidate is impossible
    pruned: int = 0  # number of candidates that have not been estimated
    too_large: dict[GridSizes, float] = field(default_factory=dict)  # grids that do not fit, and GiB they need at least
    exact: dict[GridSizes, Callable[[], float]] = field(default_factory=dict)  # return the exact GiB of ``too_large``
    options: dict[str, Any] = field(default_factory=dict)  # settings that need the minimum memory

    def least(self) -> Least:
        """Return the minimum over the grids that do not fit. It is a lower bound if there are too many grids."""
        for _ in range(_MAX_MEASURED):
            sizes = min(self.too_large, key=self.too_large.__getitem__)
            if sizes not in self.exact:
                break
            self.too_large[sizes] = self.exact.pop(sizes)()
        sizes = min(self.too_large, key=self.too_large.__getitem__)
        return Least(self.too_large[sizes], sizes, sizes not in self.exact)

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


def fewest_devices(config: Config, limit: int, keys: Sequence[str] = ()) -> int | None:
    """Return the minimum number of devices, up to ``limit`` and the machine's number, that can train ``config``.

    Args:
        config: the configuration; its grid sizes are ignored.
        limit: maximum number.
        keys: options that the planner may choose (gpt4d.planner.options).

    Returns None if no number of devices is sufficient.
    """
    smallest = levels(config, keys)[-1:]
    state = training_state(smallest[0].description, GridSizes(), config.optim, compute_bytes(config))
    for devices in range(1, int(min(limit, devices_of(config.cluster))) + 1):
        search = Search(smallest, devices)
        available = search.memory_gib - search.config.cluster.reserved_gib
        if available <= 0:
            return None  # devices that share the memory of a node have too little memory each
        if sum(state.values()) / GIB <= available * devices and search.any_fits():
            return devices
    return None


def fewest_microbatches(
    level: Level, stages: tuple[GridSizes, ...], numbers: Sequence[int] | None = None
) -> PlanEstimate | None:
    """Return the step of a single stage with the fewest microbatches that fits; None if no number fits.

    ``numbers``: the possible numbers of microbatches, ascending; None: all.
    """
    memory = usable_gib(level.config.cluster)
    numbers = microbatch_numbers(level, stages) if numbers is None else numbers
    if not numbers:
        return None
    steps = {number: level.step(stages, number) for number in numbers}

    def fits(number: int) -> bool:
        return steps[number].needed_gib(memory) <= memory

    # A single microbatch has no accumulated gradients. Among others, more microbatches never need more memory.
    fewest, most = numbers[0], numbers[-1]
    if fits(fewest):
        return steps[fewest]
    likely = next((number for number in numbers if steps[number].predicted_gib <= memory), fewest)
    if likely != fewest and fits(likely):
        most = likely
    elif not fits(most):
        return None
    # Bisection finds the fewest that fit.
    too_few, place = 0, numbers.index(most)
    while place - too_few > 1:
        middle = (place + too_few) // 2
        if fits(numbers[middle]):
            place = middle
        else:
            too_few = middle
    return steps[numbers[place]]


def microbatch_numbers(level: Level, stages: tuple[GridSizes, ...]) -> list[int]:
    """Return the numbers of microbatches to try, ascending.

    A single stage tries all. A pipeline tries, for each multiple of its stages, the largest number up to it.
    """
    if len(stages) == 1:
        share = level.config.train.batch_size // stages[0].sample_shards(level.config.parallel.context)
        return [share // size for size in micro_batch_sizes(level.config, stages[0])]
    config = with_stages(level.config, len(stages))
    possible = possible_microbatches(config.train, config.parallel, stages)
    if (given := config.parallel.pipeline.microbatches) is not None:
        return [number for number in possible if number == given]
    limits = [multiple * len(stages) for multiple in MICROBATCHES]
    return sorted({max(n for n in possible if n <= limit) for limit in limits if possible and possible[0] <= limit})


class Candidate(NamedTuple):
    """A grid for each stage, on which a step is possible."""

    stages: tuple[GridSizes, ...]
    contexts: tuple[int, ...]  # possible numbers of ranks that share samples, ascending


class Search:
    """The search on a number of devices. ``choices``: the levels that may be chosen, fewest options first."""

    def __init__(self, choices: Sequence[Level], devices: int):
        self.devices = devices
        cluster = for_devices(choices[0].config.cluster, devices)
        self.choices = [replace(level, config=replace(level.config, cluster=cluster)) for level in choices]
        self.config, self.memory_gib = self.choices[0].config, usable_gib(cluster)
        self.ranking = Ranking(options=dict(choices[-1].options))

    def candidates(self) -> Iterator[Candidate]:
        """Yield the candidates whose training state fits. Record all others in ``ranking``."""
        level, ranking = self.choices[-1], self.ranking
        rules, optim = level.description.rules, level.config.optim
        for count in self._stage_counts():
            if self.devices % count:
                use = shortened(divisors(self.devices))
                problem = f"does not divide {self.devices} device(s); use one of {use}"
                ranking.problem = f"parallel.pipeline.stages={count}: {problem}"
                continue
            staged = with_stages(level.config, count)
            for sizes in grids(self.devices // count):
                stages = (sizes,) * count
                contexts = self.contexts(stages)
                if not contexts:
                    ranking.impossible += count == 1
                    grid = grid_problem(rules, staged.train, staged.parallel, sizes)
                    ranking.problem = ranking.problem or grid or _no_numbers(staged)
                    continue
                state = training_state(level.describe([sizes]), sizes, optim, compute_bytes(level.config))
                reserved = reserved_gib(level.config, sizes, self.devices, contexts[0])
                candidate = Candidate(stages, contexts)
                if (needed := reserved + sum(state.values()) / count / GIB) > self.memory_gib:
                    self._reject(candidate, needed)
                else:
                    yield candidate

    def contexts(self, stages: tuple[GridSizes, ...]) -> tuple[int, ...]:
        """Return the possible numbers of ranks that share samples, ascending."""
        level = self.choices[-1]
        possible = possible_contexts(with_stages(level.config, len(stages)), level.description.rules, stages[0])
        return tuple(number for number in possible if microbatch_numbers(level.choosing(context=number), stages))

    def _stage_counts(self) -> list[int]:
        given = self.config.parallel.pipeline.stages
        if given is not None:
            return [given]
        blocks = len(self.choices[-1].description.blocks) if self.config.train.micro_batch_size is None else 1
        return [count for count in divisors(self.devices) if count <= blocks]

    def _reject(self, candidate: Candidate, needed: float) -> None:
        """Record a candidate that needs ``needed`` GiB at least."""
        sizes = candidate.stages[0]
        self.ranking.too_large[sizes] = needed
        self.ranking.exact[sizes] = partial(self.least_gib, candidate.stages, candidate.contexts[-1], math.inf)

    def smallest(self, stages: tuple[GridSizes, ...], context: int) -> list[PlanEstimate]:
        """Return the steps among which one needs the minimum memory."""
        level = self.choices[-1].choosing(context=context)
        variants, numbers = _variants(level, stages), microbatch_numbers(level, stages)
        if len(stages) > 1:
            schedule = self.config.parallel.pipeline.schedule or _SMALLEST_SCHEDULE
            return [variant.step(stages, numbers[-1], schedule) for variant in variants]
        # A single microbatch has no accumulated gradients.
        return [variant.step(stages, number) for variant in variants for number in {numbers[0], numbers[-1]}]

    def least_gib(self, stages: tuple[GridSizes, ...], context: int, limit: float) -> float:
        """Return the minimum GiB of a device over all settings, or a lower bound if it exceeds ``limit``."""
        return min(step.needed_gib(limit) for step in self.smallest(stages, context))

    def any_fits(self) -> bool:
        """Return whether any candidate fits."""
        return any(
            self.least_gib(candidate.stages, candidate.contexts[-1], self.memory_gib) <= self.memory_gib
            for candidate in self.candidates()
        )

    def fits(self, step: PlanEstimate) -> bool:
        """Return whether a step fits in the memory of the devices."""
        return step.needed_gib(self.memory_gib) <= self.memory_gib

    # ---------------------------------------------------------------------------------------- the fastest step

    def steps(self, candidate: Candidate) -> list[PlanEstimate]:
        """Return the steps of a candidate that fit and may be the fastest, fewest options first.

        They have the fewest ranks that share samples with which a step fits. If none fits, the list is empty.
        """
        stages, contexts = candidate.stages, candidate.contexts
        for context in contexts:
            if found := self.fastest(stages, context):
                return found
            needed = self.least_gib(stages, contexts[-1], self.memory_gib)
            if needed > self.memory_gib:
                break
        self._reject(candidate, needed)
        return []

    def fastest(self, stages: tuple[GridSizes, ...], context: int) -> list[PlanEstimate]:
        """Return the step with the fewest options that fits, and the fastest step if it is another one.

        Options are useful because they allow fewer microbatches. So a level is skipped if it cannot be faster even with
        the fewest, or if its computation alone takes longer than the fastest step.
        """
        fewest = best = None
        first, *further = [level.choosing(context=context) for level in self.choices]
        numbers = microbatch_numbers(first, stages)
        for level in (first, *further):
            if best:
                limit_s = (1 - LEAST_GAIN) * best.quick_s
                useful = numbers[:1] if len(stages) == 1 else numbers
                if all(first.step(stages, number).least_s >= limit_s for number in useful):
                    break
                if compute_s(level.config, level.description, self.devices) >= limit_s:
                    continue
            found = self.fastest_number(level, stages, numbers, best.quick_s if best else math.inf)
            if found:
                fewest = fewest or found
                best = min(best or found, found, key=lambda step: step.quick_s)
                numbers = [number for number in numbers if number < best.microbatches]
            elif level is first and not any(map(self.fits, self.smallest(stages, context))):
                return []
        if not fewest or not best:
            return [*filter(self.fits, self.smallest(stages, context))][:1]
        return [fewest] if fewest is best else [fewest, best]

    def fastest_number(
        self, level: Level, stages: tuple[GridSizes, ...], numbers: Sequence[int], limit_s: float = math.inf
    ) -> PlanEstimate | None:
        """Return the fastest step of a level that fits, with one of these numbers of microbatches, ascending.

        A step of a single stage is fastest with the fewest. Tokens are split if they allow fewer. A pipeline has a
        limit of its seconds, ``limit_s``.
        """
        best = None
        for variant in _variants(level, stages):
            if best:
                limit_s, numbers = best.quick_s, [number for number in numbers if number < best.microbatches]
            if len(stages) == 1:
                best = fewest_microbatches(variant, stages, numbers) or best
            else:
                best = self.faster((variant.step(stages, number) for number in reversed(numbers)), limit_s) or best
        return best

    def faster(self, steps: Iterable[PlanEstimate], limit_s: float) -> PlanEstimate | None:
        """Return the fastest step that fits and takes less than ``limit_s``; None without one."""
        fastest = None
        for step in steps:
            # Evaluate the cheapest estimates first: memory, then a lower bound of the time.
            if self.fits(step) and step.least_s < limit_s and step.quick_s < limit_s:
                fastest, limit_s = step, step.quick_s
        return fastest

    def level_of(self, plan: PlanEstimate) -> Level:
        """Return the level with the options and choices that the planner has added to a plan."""
        return self.choices[0].with_options(plan.options).choosing(**plan.choice)


def _variants(level: Level, stages: tuple[GridSizes, ...]) -> list[Level]:
    """Return the level alone and, if possible, with tokens that x splits (sequence parallelism)."""
    split = [level.choosing(sequence_parallel=True)] if may_split_tokens(level.config, stages[0]) else []
    return [level, *split]


def may_split_tokens(config: Config, sizes: GridSizes) -> bool:
    """Return whether sequence parallelism is possible and not enabled."""
    parallel, length = config.parallel, config.train.seq_len // config.parallel.context
    return not parallel.sequence_parallel and sizes.x > 1 and length % sizes.x == 0


def _no_numbers(config: Config) -> str:
    """Return why no number of microbatches is possible."""
    pipeline, batch = config.parallel.pipeline, config.train.batch_size
    if pipeline.microbatches is not None:
        return f"parallel.pipeline.microbatches={pipeline.microbatches}: does not cut train.batch_size={batch}"
    return f"train.batch_size={batch}: too small for {pipeline.stages} stages"


def check_machine(cluster: ClusterConfig, devices: int) -> None:
    """Raise ConfigError if the machine has fewer than ``devices`` devices."""
    if devices_of(cluster) < devices:
        raise ConfigError(
            f"cluster.levels: {cluster.name} has {devices_of(cluster)} device(s), not {devices}; use another cluster, "
            "or set ranks: null in the outermost level"
        )


def devices_of(cluster: ClusterConfig) -> float:
    """Return the number of devices of a machine, which may be infinite."""
    return math.prod(math.inf if level.ranks is None else level.ranks for level in cluster.levels)
