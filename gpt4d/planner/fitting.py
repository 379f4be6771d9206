"""Check of a run's planned memory against its devices, with settings or numbers of devices that fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import (
    CONFIG_DIR,
    GRID_KEYS,
    ClusterConfig,
    Config,
    ConfigError,
    ParallelConfig,
    possible_microbatches,
    read_cluster,
)
from gpt4d.config.fields import as_overrides
from gpt4d.planner.candidates import MAX_DEVICES, Search, fewest_devices, microbatch_numbers
from gpt4d.planner.options import levels, open_keys
from gpt4d.planner.search import rank, with_fewer_options
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import total_gib

_EXAMPLE = "dgx_h100"  # suggested machine if the configured one is too small
_NUM_CHANGES = 2  # maximum number of changes in a message


@dataclass(frozen=True)
class SuggestedChange:
    """Settings with which a run fits on its grid, and the plan with them."""

    settings: Mapping[str, Any]
    plan: PlanEstimate

    def __str__(self) -> str:
        return f"{' '.join(as_overrides(self.settings))} (planned {self.plan.memory_gib:,.4g} GiB)"


@dataclass(frozen=True)
class Fit:
    """Planned memory of a run against the memory of its devices.

    Args:
        plan: the run's plan.
        cluster: the machine as it is configured, for any number of devices.
    """

    plan: PlanEstimate
    cluster: ClusterConfig

    @property
    def device_gib(self) -> float:
        """Memory of a device."""
        return total_gib(self.plan.config.cluster)

    @property
    def fits(self) -> bool:
        """Whether the planned memory is at most the memory of a device. The margin is for the planner's choices."""
        return self.plan.memory_gib <= self.device_gib

    def __str__(self) -> str:
        """Return needed and available memory in one line."""
        config = self.plan.config
        return (
            f"model={config.model.name}: a step needs {self.plan.memory_gib:,.4g} GiB of a device, and one of "
            f"{config.cluster.name} has {self.device_gib:,.4g}"
        )

    def changes(self, limit: int = _NUM_CHANGES) -> list[SuggestedChange]:
        """Return the changes of settings that fit on the same grid with the cluster's margin, fastest step first."""
        return sorted(_changes(self.plan), key=lambda change: change.plan.step_time_s)[:limit]

    def smallest(self) -> PlanEstimate | None:
        """Return the fastest plan on the minimum number of devices that can train this model with any settings."""
        config = replace(without_grid(self.plan.config), cluster=self.cluster)
        keys = open_keys(config)
        fewest = fewest_devices(config, MAX_DEVICES, keys)
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
            remedies.append(_elsewhere(self.plan.config))
        raise ConfigError(f"{self}; {', or '.join(remedies)}")


def _elsewhere(config: Config) -> str:
    """Return the remedy if no number of this machine's devices is sufficient."""
    other = read_cluster(CONFIG_DIR / "cluster" / f"{_EXAMPLE}.yaml")
    config = replace(without_grid(config), cluster=other)
    fewest = fewest_devices(config, MAX_DEVICES, open_keys(config))
    if fewest is not None:
        return f"no number of its devices suffices; {fewest} device(s) of cluster={_EXAMPLE} do"
    return "no number of its devices suffices; use a smaller model or another cluster"


def check_memory(plan: PlanEstimate, cluster: ClusterConfig) -> None:
    """Raise ConfigError, with remedies, if the planned memory of a run exceeds the memory of its devices."""
    limit = total_gib(plan.config.cluster)
    if plan.needed_gib(limit) > limit:
        Fit(plan, cluster).check()


def without_grid(config: Config) -> Config:
    """Return the configuration with the settings that the planner chooses reset to their defaults."""
    defaults = ParallelConfig()
    names = *GRID_KEYS, "rank_order", "cache_layers", "cache_scope", "context", "pipeline"
    parallel = replace(config.parallel, mode="4d", **{name: getattr(defaults, name) for name in names})
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=None))


def _changes(given: PlanEstimate) -> Iterator[SuggestedChange]:
    """Yield sets of options that allow fewer microbatches than smaller sets do, each with its fastest step that fits.

    They have the fewest ranks that share samples with which a step fits.
    """
    config, stages, parallel, train = given.config, given.grids, given.config.parallel, given.config.train
    pipeline = replace(parallel.pipeline, microbatches=None)
    free = replace(config, train=replace(train, micro_batch_size=None), parallel=replace(parallel, pipeline=pipeline))
    search = Search(levels(free, open_keys(free)), given.devices)
    for context in search.contexts(stages):
        choices = [level.choosing(context=context) for level in search.choices]
        numbers = microbatch_numbers(choices[0], stages)
        if len(stages) > 1:
            numbers = possible_microbatches(train, choices[0].config.parallel, stages)
        found = False
        for level in choices:
            if step := search.fastest_number(level, stages, numbers):
                found, numbers = True, [number for number in numbers if number < step.microbatches]
                plan = with_fewer_options(search, step)
                settings: dict[str, Any] = {f"parallel.{key}": value for key, value in plan.choice.items()}
                if len(stages) > 1 and step.microbatches != parallel.pipeline.microbatches:
                    settings["parallel.pipeline.microbatches"] = step.microbatches
                elif len(stages) == 1 and plan.micro_batch != (
                    train.micro_batch_size or plan.micro_batch * plan.microbatches
                ):
                    settings["train.micro_batch_size"] = plan.micro_batch
                yield SuggestedChange({**settings, **plan.options}, plan)
        if found:
            return
