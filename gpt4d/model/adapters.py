"""Models with low-rank adapters (LoRA), whose other weights are frozen. No torch here."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from gpt4d.config import LoraConfig
from gpt4d.model.description import Description
from gpt4d.model.parts import Part
from gpt4d.model.spec import ModelSpec
from gpt4d.parallel.layers.layer import LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.lora import AdapterSpec
from gpt4d.parallel.layout import ParameterSpec


def adapted(description: Description, settings: LoraConfig) -> Description:
    """Return the description of a model in which only the adapters of ``settings`` are trained."""
    adapter, original = AdapterSpec(settings.rank, settings.scale), description.model

    def model(parts: Sequence[Part]) -> ModelSpec:
        return cast(ModelSpec, _adapted(original(parts), "", adapter, settings.targets, {}))

    def model_flops(samples: int, length: int) -> float:
        parameters, units = result.parameters, (unit for unit in result.units if not unit.part.begins)
        used = [parameters[name] for unit in units for name in result.probe.weights(unit).forward]
        trained = [parameter for parameter in parameters.values() if not parameter.frozen]
        # The gradients of frozen weights are not computed: two of the six operations per weight and token.
        per_token = 6 * _elements(trained) - 2 * _elements(used)
        return description.training_flops(samples, length) + samples * length * per_token

    result = replace(description, model=model, model_flops=model_flops)
    return result


def _adapted(
    layer: LayerSpec, name: str, adapter: AdapterSpec, targets: Sequence[str], known: dict[tuple[str, int], LayerSpec]
) -> LayerSpec:
    """Return a layer with frozen parameters and with adapters of the linear layers whose names are in ``targets``.

    Layers that share a spec, such as equal blocks, share the result, which ``known`` contains.
    """
    key = name if isinstance(layer, LinearSpec) else "", id(layer)
    if key not in known:
        if isinstance(layer, LinearSpec) and name in targets:
            layer = replace(layer, adapter=adapter)
        other = copy.copy(layer)
        other.__dict__.pop("all_parameters", None)  # a cached property, as the two properties that are set here
        other.__dict__["own_parameters"] = {
            key: parameter if parameter.is_adapter else replace(parameter, frozen=True)
            for key, parameter in layer.own_parameters.items()
        }
        other.__dict__["children"] = {
            key: _adapted(child, key, adapter, targets, known) for key, child in layer.children.items()
        }
        known[key] = other
    return known[key]


def _elements(parameters: Iterable[ParameterSpec]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)
