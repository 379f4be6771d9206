"""Settings outside ``parallel`` that the planner may choose: sharded states, loss chunks, recomputation."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt4d.config import Config, ConfigError, GridSizes, value_of
from gpt4d.model import registry
from gpt4d.model.description import Description
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
    """A configuration with some options. All levels of a search share ``descriptions`` and ``alike``.

    ``options`` and ``choice`` are the settings that the planner has added. ``choice`` has the settings of ``parallel``.
    ``alike`` has the activations of earlier estimates, for those that differ in z and data only.
    """

    config: Config
    descriptions: Descriptions
    options: Mapping[str, Any]
    choice: Mapping[str, Any] = field(default_factory=dict)
    alike: defaultdict[tuple, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    @cached_property
    def description(self) -> Description:
        """The model without the padding that a grid needs."""
        return self.describe(())

    def describe(self, grids: Collection[GridSizes], choice: Mapping[str, Any] | None = None) -> Description:
        """Return the model with the padding that these grids need. ``choice`` overrides settings of ``parallel``."""
        parallel = replace(self.config.parallel, **(choice or {}))
        return self.descriptions.of(replace(self.config, parallel=parallel), grids)

    def with_options(self, options: Mapping[str, Any]) -> "Level":
        """Return this level, which must have no options, with ``options``."""
        return replace(self, config=with_settings(self.config, options), options=options)

    def sharing(self, context: int) -> "Level":
        """Return this level with ``context`` ranks that share samples (``parallel.context``)."""
        parallel = self.config.parallel
        if context == parallel.context:
            return self
        config = replace(self.config, parallel=replace(parallel, context=context))
        return replace(self, config=config, choice={**self.choice, "context": context})

    def without(self, key: str) -> "Level":
        """Return the level without one of its options."""
        options = {name: value for name, value in self.options.items() if name != key}
        default = value_of(Config(), key)
        return replace(self, config=with_settings(self.config, {key: default}), options=options)


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
            if key in keys and _is_allowed(with_settings(config, {**options, key: value})):
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


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as Hydra reads them."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def _is_allowed(config: Config) -> bool:
    try:
        registry.of(config.model).check(config)
    except ConfigError:
        return False
    return True
