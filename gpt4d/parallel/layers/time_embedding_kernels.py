"""The kernels of time embeddings."""

import math

import torch

_MAX_PERIOD = 10000.0


def sinusoids(timesteps, channels: int):
    dtype = timesteps.dtype if timesteps.dtype == torch.float64 else torch.float32
    exponents = torch.arange(channels // 2, dtype=dtype, device=timesteps.device) / (channels // 2)
    angles = timesteps[:, None].to(dtype) * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)


def scaled_and_shifted(x, scale, shift):
    return torch.addcmul(shift[:, None, None], x, (1 + scale)[:, None, None])
