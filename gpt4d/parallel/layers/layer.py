"""The spec of a layer: a frozen record that states its parameters and computes its forward. No torch here.

``Layer(spec, context)`` is the layer of a spec in torch. It has the parameters as attributes and runs the spec's
``forward``. The planner takes sizes and parameters from the spec.
"""

from typing import Any, Protocol

from gpt4d.parallel.layout import ParameterSpec


class BoundLayer(Protocol):
    """A layer with its parameters, whose names are attributes.

    Attributes:
        context: the settings of the stage: its grid, its weights, dtypes, recomputation.
    """

    context: Any

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...


class LayerSpec:
    """The spec of one kind of layer. A subclass is a frozen dataclass of the layer's sizes."""

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by their names in the layer."""
        return {}

    def prepare(self, layer: BoundLayer) -> None:
        """Set further attributes of a layer that is being built."""

    def forward(self, layer: BoundLayer, *inputs: Any) -> Any:
        """Return the outputs of ``layer``; a coroutine if the layer communicates while other chunks compute."""
        raise NotImplementedError
