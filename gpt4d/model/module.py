"""Models as torch modules, their initial weights and the keys of their dropout.

Both depend on (seed, name, global index) only and not on the grid.
"""

from typing import Any

import torch
from torch import nn

from gpt4d.model.parts import ModelSpec
from gpt4d.parallel import random
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.activations import DropoutSpec
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layout import spec_of


class Model(Layer):
    """A model, or parts of one. Its parameters are uninitialized until ``initialize``."""

    spec: ModelSpec

    def loss_sum(self, *batch: Any) -> torch.Tensor:
        """Return the loss of a full model, summed, not averaged, over this rank's samples."""
        (part,) = self.spec.parts
        return self.spec.compute(self, part, {}, *batch)["loss"]


def initialize(model: nn.Module, seed: int, grid: Grid) -> None:
    """Fill this rank's shard of every parameter according to its spec, and set the key of every dropout."""
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        with torch.no_grad():
            if not spec.std:
                parameter.fill_(spec.mean)
                continue
            slices = tuple(slice(*ends) for ends in spec.stored_region(grid.sizes._asdict(), grid.indices))
            values = random.normal(random.key(seed, name), spec.stored_shape, slices, parameter.device)
            if values.shape != parameter.shape:
                parameter.zero_()  # the padding, which does not affect results
            used = parameter[tuple(slice(extent) for extent in values.shape)]
            # Not add_(values, alpha=std), which rounds once on some devices and twice on others.
            used.copy_(values.mul_(spec.std))
            if spec.mean:
                used.add_(spec.mean)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "spec", None), AttentionSpec | DropoutSpec):
            module.key = random.key(seed, name)
