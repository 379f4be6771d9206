"""The embedding of a diffusion's timesteps, and what a block makes of it (Nichol & Dhariwal).

No axis but z splits its weights: it is whole on every rank of x and y. Only a block's scales and shifts are split.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.weights import WeightStream

WHOLE = Axes(None, None)


def sinusoids(timesteps: torch.Tensor, channels: int, max_period: float = 10000.0) -> torch.Tensor:
    """Return cosines and then sines of timesteps [B] at frequencies from 1 down to 1/max_period, float32 [B, channels].

    float64 timesteps give float64. ``channels`` is even.
    """
    dtype = timesteps.dtype if timesteps.dtype == torch.float64 else torch.float32
    exponents = torch.arange(channels // 2, dtype=dtype, device=timesteps.device) / (channels // 2)
    angles = timesteps[:, None].to(dtype) * torch.exp(-math.log(max_period) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)


class TimeEmbedding(nn.Module):
    """Timesteps [B] → [B, hidden], the same on every rank of x and y."""

    def __init__(self, weights: WeightStream, channels: int, hidden: int, std: float = 0.02):
        super().__init__()
        self.channels, self.dtype = channels, weights.compute_dtype
        self.up = Layer(LinearSpec(channels, hidden, axes=WHOLE, std=std), weights)
        self.down = Layer(LinearSpec(hidden, hidden, axes=WHOLE, std=std), weights)

    async def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        return await self.down(F.silu(await self.up(sinusoids(timesteps, self.channels).to(self.dtype))))


class ScaleShift(nn.Module):
    """Scales and shifts [B, height, width, channels over ``axis``] by what a linear layer makes of the embedding."""

    def __init__(self, weights: WeightStream, hidden: int, channels: int, axis: str, std: float = 0.02):
        super().__init__()
        self.linear = Layer(LinearSpec(hidden, channels, axes=Axes(None, axis), num_fused=2, std=std), weights)

    async def forward(self, x_BHWC: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        scale, shift = (await self.linear(F.silu(embedding))).unbind(1)
        return torch.addcmul(shift[:, None, None], x_BHWC, (1 + scale)[:, None, None])
