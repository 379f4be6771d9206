"""Weights that are split over z: layers gather them, and their gradients are reduce-scattered.

z splits the shard of a weight at one (x, y) once more for storage (Ŵ in the 4D paper's Algorithm 1). A layer needs the
gathered weight when it multiplies (line 2), and the gradient is reduce-scattered over z (line 12).
gpt4d.parallel.engine.prefetch decides when to communicate (§IV):

- OAG: while a layer computes, the weights of the next layers are gathered.
- ORS: a gradient's reduce-scatter is waited for once the backward is over, or when too many are in flight.
- the cache: weights of chosen blocks stay gathered from the forward until the backward no longer needs them, or for
  the entire step. Then their gradients are accumulated before one reduce-scatter over z.

Weights that are replicated over z need no communication here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gpt4d.parallel.context import Context
from gpt4d.parallel.layout import ParameterSpec, spec_of
from gpt4d.parallel.weights import Weights


class ShardedWeights(Weights):
    """Creates the parameters of one stage, gathers their z-shards and reduces their gradients.

    Args:
        context: grid and settings of the stage.
        dtype: dtype of the master weights and of their gradients.
        device: where the parameters live.
    """

    def __init__(self, context: Context, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__(context)
        self.dtype, self.device = dtype, torch.device(device)
        # Called after each addition to a gradient, and before a gather, to make sure that the shard is up to date.
        self.on_gradient: Callable[[nn.Parameter], None] = lambda shard: None
        self.pre_gather_hook: Callable[[nn.Parameter], None] = lambda shard: None

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        """Return this rank's part of a new parameter, with the attribute ``spec``. Its values are not set yet."""
        dtype = self.dtype if spec.has_master_dtype else self.context.compute_dtype
        shape = self.context.grid.local_shape(spec.shape, spec.layout)
        local = torch.empty(shape, dtype=dtype, device=self.device)
        # The backward of a stage begins at its streamed weights, even if they are frozen.
        parameter: Any = nn.Parameter(local, requires_grad=spec.streamed or not spec.frozen)
        parameter.spec = spec
        return parameter

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the global names of the parameters, which the order of uses refers to."""
        self._shards = dict(parameters)
        self.specs = {name: spec_of(parameter) for name, parameter in parameters.items()}
        self._names = {parameter: name for name, parameter in parameters.items()}

    def change(self, specs: Mapping[str, ParameterSpec]) -> None:
        """Store these weights with other layouts. Call it before they have values."""
        for name, spec in specs.items():
            parameter = self._shards[name]
            parameter.spec = self.specs[name] = spec
            shape = self.context.grid.local_shape(spec.shape, spec.layout)
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=self.device)

    def current_shard(self, weight: str) -> nn.Parameter:
        shard = self._shards[weight]
        self.pre_gather_hook(shard)
        return shard

    def _name(self, shard: nn.Parameter) -> str:
        """Return a weight's name. A weight that ``bind`` has not named gets a name, which no order contains."""
        name = self._names.get(shard)
        if name is None:
            name = f"unnamed {len(self._names)}"
            self._names[shard], self._shards[name], self.specs[name] = name, shard, spec_of(shard)
        return name

    def gradient(self, weight: str) -> torch.Tensor | None:
        return self._shards[weight].grad

    def set_gradient(self, weight: str, gradient: torch.Tensor) -> None:
        shard = self._shards[weight]
        shard.grad = gradient
        self.on_gradient(shard)

    def accumulate(self, weight: str, part: torch.Tensor) -> None:
        earlier = self._shards[weight].grad
        self.set_gradient(weight, part if earlier is None else earlier.add_(part))


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of gathered weights, unless they are float8, and of activations for ``train.precision``."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.float32 if precision == "fp32" else torch.bfloat16
