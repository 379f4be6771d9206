"""Layers as torch modules."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from gpt4d.parallel.context import INFERENCE, Pass
from gpt4d.parallel.layers.layer import LayerSpec, LayersSpec
from gpt4d.parallel.sharded_weights import ShardedWeights


class Layer(nn.Module):
    """A layer of a stage, built from its spec. Its parameters are not initialized."""

    def __init__(self, spec: LayerSpec, weights: ShardedWeights):
        super().__init__()
        self.spec, self.weights, self.context = spec, weights, weights.context
        for name, parameter in spec.own_parameters.items():
            self.register_parameter(name, weights.parameter(parameter))
        for name, layer in spec.children.items():
            self.add_module(name, _module(layer, weights))
        self.__dict__.update(self._modules)  # torch looks into its ``_modules`` last, which takes longer
        spec.prepare(self)

    @property
    def current_pass(self) -> Pass:
        return self.context.training if torch.is_grad_enabled() else INFERENCE

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        recomputation = self.weights.schedule.recomputation
        # There is no random state to preserve: dropout is a function of the index of an element, not of a generator.
        return checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), recomputation()),
        )

    def forward(self, *inputs: Any) -> Any:
        return self.spec.forward(self, *inputs)

    def __call__(self, *inputs: Any) -> Any:
        # Without hooks, torch's own call takes 2 to 4 % of the host's time of a GPT-2 block.
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*inputs)
        return super().__call__(*inputs) if _has_any_global_hook() else self.spec.forward(self, *inputs)

    def extra_repr(self) -> str:
        return str(self.spec)


def _module(spec: LayerSpec, weights: ShardedWeights) -> nn.Module:
    if isinstance(spec, LayersSpec):
        return nn.ModuleDict({name: Layer(layer, weights) for name, layer in spec.children.items()})
    return Layer(spec, weights)
