"""Width transfer: the best learning rate of a narrow model also fits a wide one. No torch here.

It is the maximal update parametrization (Yang et al., Tensor Programs V, Table 8) without multipliers in the forward: a
multiplier of a parameter is equivalent to other initial values and another learning rate of AdamW. So checkpoints,
exports and the computation are unchanged. With the relative width m = features / features of the base model:

- A weight of a hidden layer has initial values that are divided by sqrt(m), and a learning rate that is divided by m.
- A router's logits are outputs: initial values and learning rate of its weight are divided by m.
- Instead of logits that are divided by m, the norm before the output head has initial values and a learning rate that
  are divided by m. So a tied head and an embedding keep theirs.

Weight decay is multiplied by the same factor as the learning rate is divided by (gpt4d.optim.optimizer).
"""

from collections.abc import Sequence
from dataclasses import replace

from gpt4d.model.description import Description
from gpt4d.model.parts import Part
from gpt4d.model.spec import ModelSpec
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.layer import LayerSpec
from gpt4d.parallel.layout import ParameterSpec


def widened(description: Description, width: float) -> Description:
    """Return the description of a model with initial values and learning rates for a relative ``width``."""
    original = description.model

    def hidden(_: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        # The standard deviation of a convolution already depends on its width.
        initial = {"matrices": 1.0 if isinstance(layer, Conv2dSpec) else width**-0.5, "router": 1 / width}
        return layer, {
            key: _scaled(spec, layer, initial[spec.group], 1 / width) if spec.group in initial else spec
            for key, spec in layer.own_parameters.items()
        }

    def outer(name: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        factors = {key: width ** -description.width_exponents.get(f"{name}.{key}", 0) for key in layer.own_parameters}
        return layer, {
            key: _scaled(spec, layer, factors[key], factors[key]) for key, spec in layer.own_parameters.items()
        }

    def model(parts: Sequence[Part]) -> ModelSpec:
        spec = original(parts).rewritten(hidden)
        for name in {key.partition(".")[0] for key in description.width_exponents} & spec.children.keys():
            spec.children[name] = spec.children[name].rewritten(outer, name)
        return spec

    return replace(description, model=model)


def _scaled(spec: ParameterSpec, layer: LayerSpec, initial: float, lr_factor: float) -> ParameterSpec:
    """Return a parameter whose initial values are multiplied by ``initial``."""
    offset = float(getattr(layer, "zero_centered", False))  # the layer adds it to the parameter
    mean = (spec.mean + offset) * initial - offset
    return replace(spec, mean=mean, std=spec.std * initial, lr_factor=lr_factor)
