"""Models with low-rank adapters (LoRA), whose other weights are frozen. No torch here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

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

    def change(name: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        if isinstance(layer, LinearSpec) and name in settings.targets:
            layer = replace(layer, adapter=adapter)
        parameters = layer.own_parameters.items()
        return layer, {key: spec if spec.is_adapter else replace(spec, frozen=True) for key, spec in parameters}

    def model(parts: Sequence[Part]) -> ModelSpec:
        return original(parts).rewritten(change)

    def model_flops(samples: int, length: int) -> float:
        parameters, units = result.parameters, (unit for unit in result.units if not unit.part.begins)
        used = [parameters[name] for unit in units for name in result.probe.weights(unit).forward]
        trained = [parameter for parameter in parameters.values() if not parameter.frozen]
        # The gradients of frozen weights are not computed: two of the six operations per weight and token.
        per_token = 6 * _elements(trained) - 2 * (_elements(used) - description.unused_parameters)
        return description.training_flops(samples, length) + samples * length * per_token

    result = replace(description, model=model, model_flops=model_flops)
    return result


def _elements(parameters: Iterable[ParameterSpec]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)
