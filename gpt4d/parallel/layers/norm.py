"""LayerNorm over a hidden dim that y splits: mean and variance are those of the whole dim, on every grid."""

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import collectives, layout
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.weights import WeightStream


class LayerNormFunction(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the last dim, cut in equal parts over ``axis``."""

    @staticmethod
    def forward(ctx, x, weight, bias, axis: Axis, epsilon: float):
        wide = x if x.dtype == torch.float64 else x.float()
        # Means and variances of the parts, then those of the whole (Chan et al.): one small all-gather, and no
        # difference of large squares.
        mean = wide.mean(-1)
        variance = (wide - mean.unsqueeze(-1)).square_().mean(-1)  # torch.var_mean takes five times as long on a CPU
        parts = collectives.all_gather(torch.stack((mean, variance)).unsqueeze(0), axis)
        mean = parts[:, 0].mean(0)
        variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
        mean, rstd = mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.axis = axis
        return ((wide - mean) * rstd * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        normal, d_out = (x - mean) * rstd, d_out.to(rstd.dtype)
        d_normal = d_out * weight
        sums = torch.stack((d_normal.sum(-1), (d_normal * normal).sum(-1)))
        sums = collectives.all_reduce(sums, ctx.axis).div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        d_x = (d_normal - sums[0] - normal * sums[1]) * rstd
        d_weight = (d_out * normal).flatten(0, -2).sum(0)
        d_bias = d_out.flatten(0, -2).sum(0)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None, None


class LayerNorm(nn.Module):
    """``[..., features over y] → [..., features over y]``; statistics are taken in float32 at least."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__()
        self.axis, self.epsilon = weights.grid.y, epsilon
        self.weight = weights.parameter((features,), layout.NORM, mean=1.0)
        self.bias = weights.parameter((features,), layout.NORM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if self.axis.size == 1:
            return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        return LayerNormFunction.apply(x, weight, bias, self.axis, self.epsilon)
