"""Weights that are split over z: layers gather them, and their gradients are reduce-scattered.

z splits the shard of a weight at one (x, y) once more for storage (Ŵ in the 4D paper's Algorithm 1). A layer needs the
gathered weight when it multiplies (line 2), and the gradient is reduce-scattered over z (line 12).
gpt4d.parallel.engine.prefetch decides when to communicate (§IV):

- OAG: while a layer computes, the weights of the next layers are gathered (gpt4d.parallel.engine.prefetch).
- ORS: a gradient's reduce-scatter is waited for once the backward is over, or when too many are in flight.
- the cache: weights of chosen blocks stay gathered from the forward until the backward no longer needs them, or for
  the entire step. Then their gradients are accumulated before one reduce-scatter over z.

Weights that are replicated over z need no communication here.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Context
from gpt4d.parallel.layout import ParameterSpec, spec_of
from gpt4d.parallel.weights import Weights

_ALONE = Axis("z")  # an axis of one device: a collective on it returns its input


class ShardedWeights(Weights):
    """Creates the parameters of one stage, gathers their z-shards and reduces their gradients.

    Args:
        context: grid and settings of the stage.
        dtype: dtype of the master weights and of their gradients.
        device: where the parameters live.
    """

    def __init__(self, context: Context, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self._device = _TorchWeightDevice(self)
        super().__init__(context, self._device)
        self.dtype, self.device = dtype, torch.device(device)
        # Called after each addition to a gradient, and before a gather, to make sure that the shard is up to date.
        self.on_gradient: Callable[[nn.Parameter], None] = lambda shard: None
        self.pre_gather_hook: Callable[[nn.Parameter], None] = lambda shard: None
        self._parameters: dict[str, nn.Parameter] = {}
        self.statistics: dict[Any, torch.Tensor] = {}  # sums of the step's microbatches, by layer

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        """Return this rank's part of a new parameter, with the attribute ``spec``. Its values are not set yet."""
        shape = self.context.grid.local_shape(spec.shape, spec.layout)
        local = torch.empty(shape, dtype=self._dtype_of(spec), device=self.device)
        # The backward of a stage begins at its streamed weights, even if they are frozen.
        parameter: Any = nn.Parameter(local, requires_grad=spec.streamed or not spec.frozen)
        parameter.spec = spec
        return parameter

    def trains(self, shard: nn.Parameter) -> bool:
        spec: ParameterSpec | None = getattr(shard, "spec", None)  # weights of ATPLinear have none
        return spec is None or not spec.frozen

    def _dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        """Return the dtype of a parameter: frozen weights have no master weights."""
        return self.context.compute_dtype if spec.frozen and not spec.state else self.dtype

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the global names of the parameters, which the order of uses refers to."""
        self._parameters = dict(parameters)
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._device.forget_axes()

    def change(self, specs: Mapping[str, ParameterSpec]) -> None:
        """Store these weights with other layouts. Call it before they have values."""
        for name, spec in specs.items():
            parameter: Any = self._parameters[name]
            parameter.spec = spec
            shape = self.context.grid.local_shape(parameter.spec.shape, parameter.spec.layout)
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        self._device.forget_axes()

    def add_statistics(self, layer: Any, values: torch.Tensor) -> None:
        earlier = self.statistics.get(layer)
        self.statistics[layer] = values if earlier is None else earlier + values

    def _checkpointed(
        self, function: Callable, inputs: Sequence[Any], around: Callable[[], AbstractContextManager]
    ) -> Any:
        # There is no random state to preserve: dropout is a function of the index of an element, not of a generator.
        contexts = partial(_contexts, around)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def _name(self, shard: nn.Parameter) -> str:
        """Return a weight's name. A weight that ``bind`` has not named gets a name, which no order contains."""
        name = self._names.get(shard)
        if name is None:
            name = f"unnamed {len(self._names)}"
            self._names[shard], self._parameters[name] = name, shard
        return name

    def compute_delayed_gradients(self) -> None:
        with torch.no_grad():
            super().compute_delayed_gradients()


def _contexts(around: Callable[[], AbstractContextManager]) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a function and of its recomputation."""
    return nullcontext(), around()


class _SplitWeight(NamedTuple):
    """A weight's shard, its spec, and the axis to gather it over."""

    shard: nn.Parameter
    spec: ParameterSpec
    axis: Axis


class _TorchWeightDevice:
    """The weights of a stage as ``gpt4d.parallel.engine.prefetch.WeightDevice``."""

    def __init__(self, weights: ShardedWeights):
        self._weights = weakref.proxy(weights)  # in a reference cycle, tensors live until the garbage collector runs
        self._gatherings: dict[str, _SplitWeight] = {}

    def forget_axes(self) -> None:
        """Forget the axes of all weights, because layouts or names have changed."""
        self._gatherings.clear()

    def is_split(self, weight: str) -> bool:
        return self._of(weight).axis.size > 1

    def start_gather(self, weight: str) -> Pending:
        (shard, spec, axis), weights = self._of(weight), self._weights
        weights.pre_gather_hook(shard)
        return weights.start_gather(shard.detach(), spec, axis, shard)

    def start_scatter(self, weight: str, gradient: torch.Tensor) -> Pending:
        shard, _, axis = self._of(weight)
        return axis.start_reduce_scatter(gradient, parameter=shard)

    def wait(self, pending: Pending) -> torch.Tensor:
        return pending.wait()

    def gradient(self, weight: str) -> torch.Tensor | None:
        return self._of(weight).shard.grad

    def set_gradient(self, weight: str, gradient: torch.Tensor) -> None:
        shard = self._of(weight).shard
        shard.grad = gradient
        self._weights.on_gradient(shard)

    def add_gradient(self, weight: str, part: torch.Tensor) -> None:
        shard = self._of(weight).shard
        shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._weights.on_gradient(shard)

    def _of(self, weight: str) -> _SplitWeight:
        found = self._gatherings.get(weight)
        if found is None:
            shard = self._weights._parameters[weight]
            spec = spec_of(shard)
            split = spec.gathered
            assert not split or spec.layout.dims[0][-1:] == ("z",), f"z must split the rows of {spec}, innermost"
            found = _SplitWeight(shard, spec, self._weights.context.grid.z if split else _ALONE)
            self._gatherings[weight] = found
        return found


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of gathered weights, unless they are float8, and of activations for ``train.precision``."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.float32 if precision == "fp32" else torch.bfloat16
