"""Settings outside ``parallel`` that the planner may choose: sharded states, loss chunks, recomputation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt4d.config import Config, ConfigError, GridSizes, value_of, with_stages
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.parallel.stage_plan import consecutive_stages
from gpt4d.planner.stages import Known, PlanEstimate, stage_parts
from gpt4d.planner.workload import Descriptions

RECOMPUTATION = "train.activation_checkpointing"
# In ascending order of their cost in time. Each entry is tried together with all entries before it.
_SAVINGS: tuple[dict[str, Any], ...] = (
    {"optim.shard_states": True, "train.loss_chunks": 8},
    {RECOMPUTATION: "selective"},
    {RECOMPUTATION: "full"},
)
KEYS = "optim.shard_states", "train.loss_chunks", RECOMPUTATION


@dataclass(frozen=True)
class Level:
    """A configuration with some settings that the planner has added. All levels of a search share ``known``.

    Args:
        config: all settings.
        descriptions: the descriptions of the model.
        options: added settings outside ``parallel``, by key.
        choice: added settings of ``parallel``.
        known: values that estimates share, by their description and added settings.
    """

    config: Config
    descriptions: Descriptions
    options: Mapping[str, Any]
    choice: Mapping[str, Any] = field(default_factory=dict)
    known: dict[tuple, Known] = field(default_factory=dict)

    @cached_property
    def description(self) -> Description:
        """The model without the padding that a grid needs."""
        return self.describe(())

    def describe(self, grids: Collection[GridSizes]) -> Description:
        """Return the model with the padding that these grids need."""
        return self.descriptions.of(self.config, grids)

    def with_options(self, options: Mapping[str, Any]) -> "Level":
        """Return this level, which must have no options, with ``options``."""
        return replace(self, config=with_settings(self.config, options), options=options)

    def choosing(self, **choice: Any) -> "Level":
        """Return this level with settings of ``parallel``."""
        parallel = self.config.parallel
        new = {key: value for key, value in choice.items() if getattr(parallel, key) != value}
        if not new:
            return self
        config = replace(self.config, parallel=replace(parallel, **new))
        return replace(self, config=config, choice={**self.choice, **new})

    def without(self, key: str) -> "Level":
        """Return the level without one of its options."""
        options = {name: value for name, value in self.options.items() if name != key}
        default = value_of(Config(), key)
        return replace(self, config=with_settings(self.config, {key: default}), options=options)

    def step(
        self, grids: tuple[GridSizes, ...], microbatches: int, schedule: str | None = None, chunks: int = 1
    ) -> PlanEstimate:
        """Return the estimate of a step on stages with these grids, by default with the configuration's schedule."""
        config, description = with_stages(self.config, len(grids)), self.describe(grids)
        if schedule is not None:
            pipeline = replace(config.parallel.pipeline, schedule=schedule, chunks_per_stage=chunks)
            config = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        name = id(description), *self.options.items(), *self.choice.items()
        known = self.known.setdefault(name, Known())
        parts = known.parts.get((len(grids), chunks)) or stage_parts(config, description)
        known.parts[len(grids), chunks] = parts
        stages = consecutive_stages(grids, parts, config.parallel.rank_order)
        return PlanEstimate(
            config, description, stages, microbatches, options=self.options, choice=self.choice, known=known
        )


def levels(config: Config, keys: Collection[str] = ()) -> list[Level]:
    """Return the configuration alone, then with options, each level with the savings of the one before it.

    Args:
        config: the user's settings.
        keys: the keys in ``KEYS`` that the planner may choose. Values that the model does not allow are skipped.
    """
    found, options = [Level(config, Descriptions(), {})], dict[str, Any]()
    for savings in _SAVINGS:
        before = options
        for key, value in savings.items():
            if key in keys and is_allowed(with_settings(config, {**options, key: value})):
                options = {**options, key: value}
        if options != before:
            found.append(found[0].with_options(options))
    return found


def open_keys(config: Config, overrides: Sequence[str] = ()) -> list[str]:
    """Return the keys in ``KEYS`` that have their default and that no override names."""
    named = {override.lstrip("+~").partition("=")[0] for override in overrides}
    return [key for key in KEYS if key not in named and value_of(config, key) == value_of(Config(), key)]


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with values for keys of its groups, such as ``train.loss_chunks``."""
    for key, value in settings.items():
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config


def is_allowed(config: Config) -> bool:
    """Return whether the model's family allows the settings."""
    try:
        registry.of(config.model).check(config)
    except ConfigError:
        return False
    return True
