"""Dropout whose masks depend on (seed, layer, sample, position) only: equal on every grid and in a recomputation."""

import torch
from torch import nn

from gpt4d.parallel import random
from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.fusion import fused
from gpt4d.parallel.layers.tokens import Tokens


@fused
def _dropped(x: torch.Tensor, rows: torch.Tensor, offset: int, p: float) -> torch.Tensor:
    return torch.where(random.keep_mask(rows, x.shape[-1], offset, p), x / (1 - p), 0)


class DropoutFunction(torch.autograd.Function):
    """Dropout of [*rows, columns] by the mask of ``random.keep_mask``, which is computed again in the backward."""

    @staticmethod
    def forward(ctx, x, rows, offset: int, p: float):
        # Not saved with autograd: a recomputation ends with the last tensor that is, so before the product of ``x``.
        ctx.mask = rows, offset, p
        return _dropped(x, *ctx.mask)

    @staticmethod
    def backward(ctx, d_out):
        return _dropped(d_out, *ctx.mask), None, None, None


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
        return DropoutFunction.apply(x, rows, self.axis.index * x.shape[-1], self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
