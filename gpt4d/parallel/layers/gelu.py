"""GELU behind a linear layer, whose bias gets its gradient where that of the GELU is computed."""

import torch
import torch.nn.functional as F

from gpt4d.parallel.fusion import fused

_ROWS = 128  # that are added up at once: torch.compile then needs no second pass over the gradients


class GeluFunction(torch.autograd.Function):
    """``gelu(x)`` of [tokens, features], approximated by tanh. ``x`` has a bias in it, whose gradient is returned."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x)
        ctx.bias = bias.shape, bias.dtype
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, d_out):
        (x,) = ctx.saved_tensors
        shape, dtype = ctx.bias
        rows = _ROWS if len(x) % _ROWS == 0 else len(x)
        d_x, d_bias = _gradients(d_out.unflatten(0, (-1, rows)), x.unflatten(0, (-1, rows)), dtype)
        return d_x.flatten(0, 1), d_bias.view(shape)


@fused
def _gradients(d_out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the input [blocks, rows, features], and its sum over all rows in ``dtype``."""
    d_x = torch.ops.aten.gelu_backward(d_out, x, approximate="tanh")
    return d_x, d_x.sum(1, dtype=dtype).sum(0)


def gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(x)``. The gradient of ``bias``, which a linear layer has added to ``x``, is computed here."""
    return GeluFunction.apply(x, bias)
