"""The spec of a layer: a frozen dataclass that states its parameters and computes its forward. No torch here.

``Layer(spec, weights)`` (gpt4d.parallel.layers.module) is the torch module of a spec. It has the parameters as
attributes and runs the spec's ``forward``. The planner reads sizes and parameters from the spec.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.layout import ParameterSpec

if TYPE_CHECKING:
    from gpt4d.parallel.weights import Weights


class BoundLayer(Protocol):
    """A layer with its parameters and its inner layers as attributes.

    Attributes:
        context: grid and settings of the stage.
        weights: the weights of the stage, which the layer gathers.
        current_pass: how the current forward computes. Only a forward reads it: a backward, and the recomputation of a
            product's input (gpt4d.parallel.layers.product.Recomputable), belong to no pass.
    """

    context: Context

    @property
    def weights(self) -> Weights: ...
    @property
    def current_pass(self) -> Pass: ...

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of blocks, keep only its inputs, and call it again in the backward."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...


# From the name of a layer and the layer to the layer and the own parameters that replace it.
Change = Callable[[str, "LayerSpec"], tuple["LayerSpec", Mapping[str, ParameterSpec]]]


class LayerSpec:
    """The spec of one kind of layer. A subclass is a frozen dataclass of the layer's sizes."""

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the layer's own parameters by name."""
        return {}

    def layers(self) -> dict[str, LayerSpec]:
        """Return the inner layers by name, in the order of their parameters."""
        return {}

    @cached_property
    def own_parameters(self) -> dict[str, ParameterSpec]:
        """The result of ``parameters()``, computed once."""
        return self.parameters()

    @cached_property
    def children(self) -> dict[str, LayerSpec]:
        """The result of ``layers()``, computed once."""
        return self.layers()

    @cached_property
    def all_parameters(self) -> dict[str, ParameterSpec]:
        """The parameters of the layer and of its inner layers, by qualified name."""
        inner = {f"{name}.{key}": p for name, child in self.children.items() for key, p in child.all_parameters.items()}
        return self.own_parameters | inner

    def rewritten(self, change: Change, name: str = "", known: dict[Any, Any] | None = None) -> Any:
        """Return a copy of this layer and of its inner layers, each changed by ``change``.

        Inner layers that share a spec, such as equal blocks, share the result. So ``change`` may use the name only of a
        layer without inner layers.

        Args:
            change: returns the spec and the own parameters that replace a layer with a name.
            name: the name of this layer.
            known: layers so far, each with its result.
        """
        known = {} if known is None else known
        key = "" if self.children else name, id(self)
        if key not in known:
            changed, parameters = change(name, self)
            result = copy.copy(changed)
            result.__dict__.pop("all_parameters", None)  # a cached property, as the two properties that are set here
            result.__dict__["own_parameters"] = dict(parameters)
            result.__dict__["children"] = {
                key: child.rewritten(change, key, known) for key, child in changed.children.items()
            }
            known[key] = self, changed, result  # all stay alive, so that their ids remain unique
        return known[key][-1]

    def prepare(self, layer: BoundLayer) -> None:
        """Set additional attributes of ``layer`` when it is built."""

    def forward(self, layer: BoundLayer, *inputs: Any) -> Any:
        """Return the outputs of ``layer``, or a coroutine if its communication overlaps with other chunks."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayersSpec(LayerSpec):
    """A container of layers by name, which the enclosing layer calls."""

    named: Mapping[str, LayerSpec]

    def layers(self) -> dict[str, LayerSpec]:
        return dict(self.named)
