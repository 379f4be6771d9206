"""The registry of model families. No other module knows families by name or builds models."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from types import UnionType
from typing import TYPE_CHECKING, get_type_hints

from gpt4d.config import Config, ConfigError, GridSizes, ModelConfig, TrainConfig, check_limits
from gpt4d.config.composing import register_model
from gpt4d.model import gemma3, gpt2, llama, moe, olmo2, unet
from gpt4d.model.description import Description, adapted, widened
from gpt4d.model.family import Family
from gpt4d.model.parts import Part

if TYPE_CHECKING:
    from torch import nn

    from gpt4d.parallel.sharded_weights import ShardedWeights

_families: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family, so that its name or the class of its settings selects it."""
    _families[family.name] = family
    register_model(family.name, family.config)


def names() -> list[str]:
    """Return the names of all families."""
    return sorted(_families)


def get(name: str) -> Family:
    """Return the family called ``name``. Raises ConfigError if it is not registered."""
    if name not in _families:
        raise ConfigError(f"model family {name!r} is unknown; use one of {', '.join(names())}")
    return _families[name]


def of(config: ModelConfig) -> Family:
    """Return the family that ``config`` belongs to. Raises ConfigError for settings of no family."""
    for family in _families.values():
        if type(config) is family.config:
            return family
    raise ConfigError(
        f"model={config.name}: no model family has settings of type {type(config).__name__}; use one of "
        f"{', '.join(names())}"
    )


def check_model(model: ModelConfig) -> None:
    """Check the settings of a checkpoint or an import, which no configuration check has seen.

    Raises ConfigError unless each value has the type of its field and the model is possible on some grid.
    """
    kinds = get_type_hints(type(model))
    for key, kind in ((each.name, kinds[each.name]) for each in fields(model) if not each.metadata.get("derived")):
        if not _has_type(value := getattr(model, key), kind):
            raise ConfigError(f"model.{key}={value!r}: not of type {getattr(kind, '__name__', kind)}; correct it")
    check_limits(model, "model.")
    # A family checks a model as part of a run's configuration. Any model takes sequences of one token.
    of(model).check(Config(model=model, train=TrainConfig(seq_len=1)))


def _has_type(value: object, kind: type) -> bool:
    if isinstance(kind, UnionType):
        return any(_has_type(value, each) for each in kind.__args__)
    if kind == list[int]:
        return type(value) is list and all(type(item) is int for item in value)
    return type(value) in ((int, float) if kind is float else (kind,))


def family_of_hf(model_type: object) -> Family:
    """Return the family whose adapter reads models of this kind. Raises ConfigError for other kinds."""
    supported = {kind: family for family in _families.values() if family.adapter for kind in family.adapter.kinds}
    if not isinstance(model_type, str) or model_type not in supported:
        raise ConfigError(
            f"model_type={model_type!r} is not supported; use a model of type {', '.join(sorted(supported))}"
        )
    return supported[model_type]


def describe(config: ModelConfig) -> Description:
    """Return the torch-free description of the model with these settings, with its adapters."""
    description = of(config).describe(config)
    if config.lora is not None:
        return adapted(description, config.lora)
    return description if config.width == 1 else widened(description, config.width)


def describe_run(config: Config, grids: Iterable[GridSizes] = ()) -> Description:
    """Return the description of a run's model with the changes that ``parallel.*`` and ``train.*`` make.

    ``grids``: the grids of all stages, for which the model is padded. The configuration of a plan is already padded.
    """
    description = describe(config.model.on_grids(grids)).with_replicated_layers(config.parallel.replicated_layers)
    if config.parallel.expert_data:
        description = description.with_expert_data()
    if config.train.precision == "fp8":
        description = description.with_float8_rules()
    return replace(description, loss_chunks=config.train.loss_chunks)


def build(config: ModelConfig, weights: "ShardedWeights", parts: Sequence[Part] | None = None) -> "nn.Module":
    """Build a model, or parts of one, on the grid of ``weights``.

    Its parameters are uninitialized until ``gpt4d.model.module.initialize``.
    """
    from gpt4d.model.module import Model  # imports torch

    description = describe(config)
    model = Model(description.model(parts or [description.part(0, len(description.units))]), weights)
    weights.bind(dict(model.named_parameters()))
    return model


for _module in (gemma3, gpt2, llama, moe, olmo2, unet):
    register(_module.FAMILY)
