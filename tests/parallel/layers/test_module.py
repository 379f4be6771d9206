"""Layers as torch modules."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from gpt4d.parallel.context import Context
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.sharded_weights import ShardedWeights

_REGISTRATIONS = {
    "forward": lambda layer, note: layer.register_forward_hook(note),
    "forward_pre": lambda layer, note: layer.register_forward_pre_hook(note),
    "full_backward": lambda layer, note: layer.register_full_backward_hook(note),
    "full_backward_pre": lambda layer, note: layer.register_full_backward_pre_hook(note),
    "all_modules": lambda layer, note: register_module_forward_hook(note),
}


@pytest.mark.parametrize("kind", _REGISTRATIONS)
def test_a_layer_runs_hooks_that_are_registered(kind):
    layer = Layer(LayerNormSpec(8, 1e-5), ShardedWeights(Context(Grid.single_device(), torch.float32)))
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    calls = []
    handle = _REGISTRATIONS[kind](layer, lambda *_: calls.append(kind))
    x = torch.randn(3, 8, requires_grad=True)
    layer(x)[1].sum().backward()
    handle.remove()
    assert calls == [kind]
    layer(x)
    assert calls == [kind]
