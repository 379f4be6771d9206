"""Elementwise functions: GELU and SwiGLU (Shazeer, 2020). No torch here."""

from typing import Any

from gpt4d.parallel.function import Function, kernel


@kernel
def gelu(x):
    """Return ``gelu(x)``, approximated by tanh."""
    return x.like()


@kernel(fused=True)
def gelu_gradients(d_out, x, bias):
    """Return the gradient of the input [tokens, features], and its sum over all tokens for ``bias``."""
    return x.like(), bias.like()


@kernel(fused=True)
def swiglu(gate_and_up):
    """Return ``silu(gate) · up``, [..., features], of the two [..., 2, features] side by side."""
    return gate_and_up.like((*gate_and_up.shape[:-2], gate_and_up.shape[-1]))


@kernel(fused=True)
def swiglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``swiglu``."""
    return gate_and_up.like()


class GeluFunction(Function):
    """``gelu(x)`` of [tokens, features]. ``x`` contains a bias, whose gradient is returned."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x)
        ctx.bias = bias.detach()
        return gelu(x)

    @staticmethod
    def backward(ctx, d_out):
        return gelu_gradients(d_out, *ctx.saved_tensors, ctx.bias)


class SwigluFunction(Function):
    """``silu(gate) · up``. Only the input is saved."""

    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        return swiglu(gate_and_up)

    @staticmethod
    def backward(ctx, d_out):
        return swiglu_gradient(d_out, *ctx.saved_tensors)


def gelu_of_biased(x: Any, bias: Any) -> Any:
    """Return ``gelu(x)``. The gradient of ``bias``, which a linear layer has added to ``x``, is computed here."""
    return GeluFunction.apply(x, bias)
