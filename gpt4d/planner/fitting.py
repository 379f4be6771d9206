"""Check of a run's planned memory against its devices, with settings or numbers of devices that fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import (
    CONFIG_DIR,
    ClusterConfig,
    Config,
    ConfigError,
    GridSizes,
    ParallelConfig,
    possible_microbatches,
    read_cluster,
)
from gpt4d.plan import ParallelPlan
from gpt4d.planner import pipelines
from gpt4d.planner.capacity import fewest_devices, with_larger_micro_batch
from gpt4d.planner.estimate import Estimate, Plan
from gpt4d.planner.options import Level, as_overrides, levels, open_keys
from gpt4d.planner.search import rank, with_fewer_options
from gpt4d.planner.stages import PipelineEstimate
from gpt4d.planner.topology import total_gib
from gpt4d.planner.workload import possible_contexts

_MAX_DEVICES = 4096  # upper limit of the search for the minimum number of devices
_EXAMPLE = "dgx_h100"  # suggested machine if the configured one is too small
_NUM_CHANGES = 2  # maximum number of changes in a message


@dataclass(frozen=True)
class SuggestedChange:
    """Settings with which a run fits on its grid, and the plan with them."""

    settings: Mapping[str, Any]
    plan: Plan

    def __str__(self) -> str:
        return f"{' '.join(as_overrides(self.settings))} (planned {self.plan.memory_gib:,.4g} GiB)"


@dataclass(frozen=True)
class Fit:
    """Planned memory of a run against the memory of its devices.

    Args:
        config: the resolved configuration.
        plan: the planned step, with the memory of the fullest stage.
        cluster: the machine as it is configured, for any number of devices.
    """

    config: Config
    plan: Plan
    cluster: ClusterConfig

    @property
    def device_gib(self) -> float:
        """Memory of a device."""
        return total_gib(self.config.cluster)

    @property
    def fits(self) -> bool:
        """Whether the planned memory is at most the memory of a device. The margin is for the planner's choices."""
        return self.plan.memory_gib <= self.device_gib

    def __str__(self) -> str:
        """Return needed and available memory in one line."""
        cluster = self.config.cluster
        return (
            f"model={self.config.model.name}: a step needs {self.plan.memory_gib:,.4g} GiB of a device, and one of "
            f"{cluster.name} has {self.device_gib:,.4g}"
        )

    def changes(self, limit: int = _NUM_CHANGES) -> list[SuggestedChange]:
        """Return the changes of settings that fit on the same grid with the cluster's margin, fastest step first."""
        stages = self.plan.stages or (self.plan.sizes,)
        found = _stage_changes(self.config, stages) if len(stages) > 1 else _grid_changes(self.config, stages[0])
        return sorted(found, key=lambda change: change.plan.step_time_s)[:limit]

    def smallest(self) -> Plan | None:
        """Return the fastest plan on the minimum number of devices that can train this model with any settings."""
        config = replace(without_grid(self.config), cluster=self.cluster)
        keys = open_keys(config)
        fewest = fewest_devices(config, _MAX_DEVICES, keys)
        if fewest is None:
            return None
        return next(iter(rank(config, fewest, top=1, keys=keys).plans), None)

    def check(self) -> None:
        """Raise ConfigError if the run does not fit. The message names changes and the smallest grid that fit."""
        if self.fits:
            return
        remedies = [f"set {change}" for change in self.changes(1)]
        smallest = self.smallest()
        if smallest and smallest.devices != self.plan.devices:
            chosen = " ".join(smallest.overrides)
            remedies.append(f"use {smallest.devices} device(s), the fewest that suffice, with {chosen}")
        elif not remedies:
            remedies.append(_elsewhere(self.config))
        raise ConfigError(f"{self}; {', or '.join(remedies)}")


def _elsewhere(config: Config) -> str:
    """Return the remedy if no number of this machine's devices is sufficient."""
    other = read_cluster(CONFIG_DIR / "cluster" / f"{_EXAMPLE}.yaml")
    config = replace(without_grid(config), cluster=other)
    fewest = fewest_devices(config, _MAX_DEVICES, open_keys(config))
    if fewest is not None:
        return f"no number of its devices suffices; {fewest} device(s) of cluster={_EXAMPLE} do"
    return "no number of its devices suffices; use a smaller model or another cluster"


def fit(plan: ParallelPlan, cluster: ClusterConfig) -> Fit:
    """Return the planned memory of a run against its devices. ``cluster``: the machine as it is configured."""
    if len(plan.stages) > 1:
        return Fit(plan.config, PipelineEstimate.of(plan).plan(), cluster)
    estimate = Estimate(plan.config, plan.sizes, plan.description)
    return Fit(plan.config, estimate.plan(estimate.share // plan.microbatches), cluster)


def check_memory(plan: ParallelPlan, cluster: ClusterConfig) -> None:
    """Raise ConfigError, with remedies, if the planned memory of a run exceeds the memory of its devices."""
    limit = total_gib(plan.config.cluster)
    if PipelineEstimate.of(plan).needed_gib(limit) > limit:
        fit(plan, cluster).check()


def without_grid(config: Config) -> Config:
    """Return the configuration with the settings that the planner chooses reset to their defaults."""
    defaults = ParallelConfig()
    names = "gx", "gy", "gz", "gdata", "rank_order", "cache_layers", "cache_scope", "context", "pipeline"
    parallel = replace(config.parallel, mode="4d", **{name: getattr(defaults, name) for name in names})
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=None))


def _grid_changes(config: Config, sizes: GridSizes) -> Iterator[SuggestedChange]:
    """Yield sets of options that allow a larger microbatch than smaller sets do, each with its largest microbatch.

    If no set fits, yield them with the fewest ranks that share samples with which a step fits.
    """
    free = replace(config, train=replace(config.train, micro_batch_size=None))
    choices = levels(free, open_keys(free))
    for context in possible_contexts(free, choices[0].description.rules, sizes):
        found = list(_option_changes(config, [level.sharing(context) for level in choices], sizes))
        if found:
            yield from found
            return


def _option_changes(config: Config, choices: list[Level], sizes: GridSizes) -> Iterator[SuggestedChange]:
    largest = 0
    for choice in choices:
        estimate, micro_batch = with_larger_micro_batch(choice, sizes, largest)
        if micro_batch is None:
            continue
        largest = micro_batch
        plan = with_fewer_options(estimate.plan(micro_batch), choices)
        settings: dict[str, Any] = {f"parallel.{key}": value for key, value in plan.choice.items()}
        if micro_batch != (config.train.micro_batch_size or estimate.share):
            settings["train.micro_batch_size"] = micro_batch
        yield SuggestedChange({**settings, **plan.options}, plan)


def _stage_changes(config: Config, stages: Sequence[GridSizes]) -> Iterator[SuggestedChange]:
    """Yield sets of options, each with the number of microbatches that gives the fastest step that fits."""
    before = config.parallel.pipeline.microbatches
    for level in levels(config, open_keys(config)):
        search = pipelines.Search(level)
        numbers = possible_microbatches(config.train, config.parallel, tuple(stages))
        fastest = search.faster(search.choices(tuple(stages), numbers), float("inf"))
        if fastest:
            number = {} if fastest.microbatches == before else {"parallel.pipeline.microbatches": fastest.microbatches}
            yield SuggestedChange({**number, **level.options}, search.plan(fastest))
