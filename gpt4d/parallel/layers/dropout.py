"""Dropout whose masks depend on (seed, layer, sample, position) only: equal on every grid and in a recomputation."""

import torch
from torch import nn

from gpt4d.parallel import random
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.layers.tokens import Tokens


class Dropout(nn.Module):
    """Drops features of [tokens, features over ``axis``] with probability ``p`` while training.

    gpt4d.model.init sets ``key`` from the seed and the layer's name.
    """

    def __init__(self, p: float, axis: Axis):
        super().__init__()
        self.p, self.axis, self.key = p, axis, 0

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return ``x`` with some features zero."""
        if not self.training or self.p == 0:
            return x
        rows = random.fold(random.fold(self.key, tokens.samples), tokens.places)
        keep = random.keep_mask(rows, x.shape[-1], self.axis.index * x.shape[-1], self.p)
        return torch.where(keep, x / (1 - self.p), 0)

    def extra_repr(self) -> str:
        return f"p={self.p}"
