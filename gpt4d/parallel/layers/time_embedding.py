"""The embedding of a diffusion's timesteps, and what a block makes of it (Nichol & Dhariwal). No torch here.

No axis but z splits its weights: it is whole on every rank of x and y. Only a block's scales and shifts are split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpt4d.parallel.function import TorchFunction, kernel, planned_kernel
from gpt4d.parallel.layers.activations import silu
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.symbolic import wide_dtype

WHOLE = Axes(None, None)


@kernel
def sinusoids(timesteps, channels: int):
    """Return cosines and then sines of timesteps [B] at frequencies from 1 down to 1/10000, float32 [B, channels].

    float64 timesteps give float64. ``channels`` is even.
    """
    return timesteps.like((*timesteps.shape, channels), wide_dtype(timesteps))


@planned_kernel
def one_plus(scale):
    """Return ``1 + scale``."""
    return scale.like()


@planned_kernel
def times_and_plus(x, factor, shift):
    """Return ``x · factor + shift`` of an activation [B, height, width, channels] and two tensors [B, channels]."""
    return x.like()


@planned_kernel
def times_one(x):
    """Return a copy of ``x``: torch.addcmul's backward multiplies both factors by a number, which is 1."""
    return x.like()


@planned_kernel
def products(d_out, factor):
    """Return ``d_out`` times an activation, or times a tensor [B, channels]."""
    return d_out.like()


@planned_kernel
def sums_of_pixels(x):
    """Return the sums of an activation over its pixels, [B, channels]."""
    return x.like((x.shape[0], x.shape[-1]))


class ScaleShiftFunction(TorchFunction):
    """``x · (1 + scale) + shift`` of an activation [B, height, width, channels], with two tensors [B, channels]."""

    torch_name = "scaled_and_shifted"

    @staticmethod
    def forward(ctx, x, scale, shift):
        factor = one_plus(scale)
        ctx.save_for_backward(x, factor)
        return times_and_plus(x, factor, shift)

    @staticmethod
    def backward(ctx, d_out):
        x, factor = ctx.saved_tensors
        d_x = products(d_out, times_one(factor))
        d_factor = products(d_out, times_one(x))
        return d_x, sums_of_pixels(d_factor), sums_of_pixels(d_out)


@dataclass(frozen=True)
class TimeEmbeddingSpec(LayerSpec):
    """Timesteps [B] → [B, hidden], the same on every rank of x and y.

    Attributes:
        channels: number of sinusoids of a timestep.
        hidden: number of features of the embedding.
        std: standard deviation of the initial weights.
    """

    channels: int
    hidden: int
    std: float = 0.02

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "up": LinearSpec(self.channels, self.hidden, axes=WHOLE, std=self.std),
            "down": LinearSpec(self.hidden, self.hidden, axes=WHOLE, std=self.std),
        }

    async def forward(self, layer: BoundLayer, timesteps: Any) -> Any:
        x = cast_to(sinusoids(timesteps, self.channels), layer.context.compute_dtype)
        return await layer.down(silu(await layer.up(x)))


@dataclass(frozen=True)
class ScaleShiftSpec(LayerSpec):
    """Scales and shifts [B, height, width, channels over ``axis``]; a linear layer computes both from the embedding.

    Attributes:
        hidden: number of features of the embedding.
        channels: global number of channels.
        axis: splits the channels.
        std: standard deviation of the initial weight.
    """

    hidden: int
    channels: int
    axis: str
    std: float = 0.02

    def layers(self) -> dict[str, LayerSpec]:
        axes = Axes(None, self.axis)
        return {"linear": LinearSpec(self.hidden, self.channels, axes=axes, num_fused=2, std=self.std)}

    async def forward(self, layer: BoundLayer, x_BHWC: Any, embedding: Any) -> Any:
        scale, shift = (await layer.linear(silu(embedding))).unbind(1)
        return ScaleShiftFunction.apply(x_BHWC, scale, shift)
