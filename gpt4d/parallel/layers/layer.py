"""The spec of a layer: a frozen record that states its parameters and computes its forward. No torch here.

``Layer(spec, context)`` is the layer of a spec in torch. It has the parameters as attributes and runs the spec's
``forward``. The planner takes sizes and parameters from the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from gpt4d.parallel.layout import ParameterSpec


class BoundLayer(Protocol):
    """A layer with its parameters and the layers that it consists of, whose names are attributes.

    Attributes:
        context: grid and settings of the stage.
        weights: the weights of the stage, to gather.
        training: whether dropout drops.
    """

    context: Any
    weights: Any
    training: bool

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...


class LayerSpec:
    """The spec of one kind of layer. A subclass is a frozen dataclass of the layer's sizes."""

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by their names in the layer."""
        return {}

    def layers(self) -> dict[str, LayerSpec]:
        """Return the layers that it consists of, by their names in the layer, in the order of their parameters."""
        return {}

    @cached_property
    def own_parameters(self) -> dict[str, ParameterSpec]:
        """``parameters()``, the same objects at each call."""
        return self.parameters()

    @cached_property
    def children(self) -> dict[str, LayerSpec]:
        """``layers()``, the same objects at each call."""
        return self.layers()

    @cached_property
    def all_parameters(self) -> dict[str, ParameterSpec]:
        """Its parameters and the parameters of its inner layers, by their names in it."""
        inner = {f"{name}.{key}": p for name, child in self.children.items() for key, p in child.all_parameters.items()}
        return self.own_parameters | inner

    def prepare(self, layer: BoundLayer) -> None:
        """Set further attributes of a layer that is being built."""

    def forward(self, layer: BoundLayer, *inputs: Any) -> Any:
        """Return the outputs of ``layer``; a coroutine if the layer communicates while other chunks compute."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayersSpec(LayerSpec):
    """Layers by name, which the layer around them calls."""

    named: Mapping[str, LayerSpec]

    def layers(self) -> dict[str, LayerSpec]:
        return dict(self.named)
