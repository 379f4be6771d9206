"""Activation functions (GELU, SiLU, SwiGLU and GeGLU; Shazeer, 2020) and dropout. No torch here.

Dropout masks depend on (seed, layer, sample, position) only. They are equal on every grid and in a recomputation.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.symbolic.kernels import Function, Kernel, TorchFunction, kernel, planned_kernel


@kernel
def gelu(x):
    """Return ``gelu(x)`` with the tanh approximation."""
    return x.like()


@kernel(fused=True)
def gelu_gradients(d_out, x, bias):
    """Return the gradients of the input [tokens, features] and of ``bias``, the input's gradient summed over tokens."""
    return x.like(), bias.like()


@kernel(fused=True)
def swiglu(gate_and_up):
    """Return ``silu(gate) · up``, [..., features]. ``gate_and_up``: both tensors stacked, [..., 2, features]."""
    return gate_and_up.like((*gate_and_up.shape[:-2], gate_and_up.shape[-1]))


@kernel(fused=True)
def swiglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``swiglu``."""
    return gate_and_up.like()


@kernel(fused=True)
def geglu(gate_and_up):
    """Return ``gelu(gate) · up`` with the tanh approximation. Shapes as for ``swiglu``."""
    return gate_and_up.like((*gate_and_up.shape[:-2], gate_and_up.shape[-1]))


@kernel(fused=True)
def geglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``geglu``."""
    return gate_and_up.like()


@planned_kernel
def activated(x):
    """Return ``silu(x)``."""
    return x.like()


@planned_kernel
def silu_gradient(d_out, x):
    """Return the gradient of the input of ``silu``."""
    return x.like()


class GeluFunction(Function):
    """``gelu(x)`` of [tokens, features]. ``x`` contains ``bias``, whose gradient the backward also returns."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x)
        ctx.bias = bias.detach()
        return gelu(x)

    @staticmethod
    def backward(ctx, d_out):
        return gelu_gradients(d_out, *ctx.saved_tensors, ctx.bias)


class GatedFunction(Function):
    """An activation function of ``gate``, times ``up``. Only the input is saved."""

    output: ClassVar[Kernel]
    gradient: ClassVar[Kernel]

    @classmethod
    def forward(cls, ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        return cls.output(gate_and_up)

    @classmethod
    def backward(cls, ctx, d_out):
        return cls.gradient(d_out, *ctx.saved_tensors)


class SwigluFunction(GatedFunction):
    """``silu(gate) · up``."""

    output, gradient = swiglu, swiglu_gradient


class GegluFunction(GatedFunction):
    """``gelu(gate) · up``."""

    output, gradient = geglu, geglu_gradient


class SiluFunction(TorchFunction):
    """``silu(x)``. Only the input is saved."""

    torch_name = "silu"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return activated(x)

    @staticmethod
    def backward(ctx, d_out):
        return silu_gradient(d_out, *ctx.saved_tensors)


def silu(x: Any) -> Any:
    """Return ``x · sigmoid(x)``, saving ``x`` only."""
    return SiluFunction.apply(x)


def gelu_of_biased(x: Any, bias: Any) -> Any:
    """Return ``gelu(x)``, and compute the gradient of ``bias``, which a linear layer has added to ``x``."""
    return GeluFunction.apply(x, bias)


@kernel(fused=True)
def dropped(x, rows, offset: int, p: float):
    """Return ``x / (1 - p)`` where ``random.keep_mask`` keeps an element of ``x`` [*rows, columns], else 0."""
    return x.like()


@kernel
def row_keys(samples, places, key: int):
    """Return the key of each row's mask, int64, from the sample of the row and its position in the sample."""
    return samples.like()


class DropoutFunction(Function):
    """Dropout of [*rows, columns]. The backward recomputes the mask."""

    @staticmethod
    def forward(ctx, x, rows, offset: int, p: float):
        # Not saved with autograd: a recomputation stops at the last saved tensor, here before the product ``x``.
        ctx.mask = rows, offset, p
        return dropped(x, *ctx.mask)

    @staticmethod
    def backward(ctx, d_out):
        return dropped(d_out, *ctx.mask), None, None, None


@dataclass(frozen=True)
class DropoutSpec(LayerSpec):
    """Dropout of [tokens, features over ``axis``] with probability ``p``, active while training.

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
