"""Dropout whose masks depend on (seed, layer, sample, position) only: equal on every grid and in a recomputation."""

from dataclasses import dataclass
from typing import Any

from gpt4d.parallel.function import Function, kernel
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec


@kernel(fused=True)
def dropped(x, rows, offset: int, p: float):
    """Return ``x`` [*rows, columns], divided by ``1 - p``, where the mask of ``random.keep_mask`` keeps it, else 0."""
    return x.like()


@kernel
def row_keys(samples, places, key: int):
    """Return the key of the mask of each row, int64, from the index of its sample and its place there."""
    return samples.like()


class DropoutFunction(Function):
    """Dropout of [*rows, columns], whose mask is computed again in the backward."""

    @staticmethod
    def forward(ctx, x, rows, offset: int, p: float):
        # Not saved with autograd: a recomputation ends with the last tensor that is, so before the product of ``x``.
        ctx.mask = rows, offset, p
        return dropped(x, *ctx.mask)

    @staticmethod
    def backward(ctx, d_out):
        return dropped(d_out, *ctx.mask), None, None, None


@dataclass(frozen=True)
class DropoutSpec(LayerSpec):
    """Drops features of [tokens, features over ``axis``] with probability ``p`` while training.

    gpt4d.model.init sets the layer's ``key`` from the seed and the layer's name.
    """

    p: float
    axis: str = "y"

    def prepare(self, layer: BoundLayer) -> None:
        layer.key = 0

    def forward(self, layer: BoundLayer, x: Any, tokens: Any) -> Any:
        if not layer.training or self.p == 0:
            return x
        rows = row_keys(tokens.samples, tokens.places, layer.key)
        return DropoutFunction.apply(x, rows, layer.context.grid[self.axis].index * x.shape[-1], self.p)
