"""Activation functions (GELU, SiLU, SwiGLU and GeGLU; Shazeer, 2020) and dropout.

Dropout masks depend on (seed, layer, sample, position) only. They are equal on every grid and in a recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpt4d.parallel import random
from gpt4d.parallel.kernels import Function, KernelFunction, Tensor, TorchFunction, elementwise, kernel
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.lazy import F, torch

_ROWS = 128  # rows per partial sum: with them, torch.compile needs no second pass over the gradients


@kernel(lambda x: x.like())
def gelu(x):
    """Return ``gelu(x)`` with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


@kernel(lambda d_out, x, bias: (x.like(), bias.like()), fused=True)
def gelu_gradients(d_out, x, bias):
    """Return the gradients of the input [tokens, features] and of ``bias``, the input's gradient summed over tokens."""
    backward, shape = torch.ops.aten.gelu_backward, bias.shape
    if len(x) % _ROWS or len(x) == _ROWS:
        d_x = backward(d_out, x, approximate="tanh")
        return d_x, d_x.sum(0, dtype=bias.dtype).view(shape)
    d_x = backward(d_out.unflatten(0, (-1, _ROWS)), x.unflatten(0, (-1, _ROWS)), approximate="tanh")
    return d_x.flatten(0, 1), d_x.sum(1, dtype=bias.dtype).sum(0).view(shape)


@kernel(lambda gate_and_up: gate_and_up.like((*gate_and_up.shape[:-2], gate_and_up.shape[-1])), fused=True)
def swiglu(gate_and_up):
    """Return ``silu(gate) · up``, [..., features]. ``gate_and_up``: both tensors stacked, [..., 2, features]."""
    return _gated(gate_and_up, F.silu)


@kernel(lambda d_out, gate_and_up: gate_and_up.like(), fused=True)
def swiglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``swiglu``."""
    return _gated_gradient(d_out, gate_and_up, F.silu, torch.ops.aten.silu_backward)


@kernel(lambda gate_and_up: gate_and_up.like((*gate_and_up.shape[:-2], gate_and_up.shape[-1])), fused=True)
def geglu(gate_and_up):
    """Return ``gelu(gate) · up`` with the tanh approximation. Shapes as for ``swiglu``."""
    return _gated(gate_and_up, gelu.in_torch)


@kernel(lambda d_out, gate_and_up: gate_and_up.like(), fused=True)
def geglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``geglu``."""
    return _gated_gradient(d_out, gate_and_up, gelu.in_torch, partial(torch.ops.aten.gelu_backward, approximate="tanh"))


def _gated(gate_and_up, activation: Callable):
    """Return ``activation(gate) · up``."""
    gate, up = gate_and_up.unbind(-2)
    return activation(gate).mul_(up)


def _gated_gradient(d_out, gate_and_up, activation: Callable, backward: Callable):
    """Return the gradient of the input of ``_gated``. ``backward``: torch's backward of ``activation``."""
    gate, up = gate_and_up.unbind(-2)
    if torch.compiler.is_compiling():  # torch.compile does not support an out= argument that is a view
        return torch.stack((backward(d_out * up, gate), activation(gate) * d_out), -2)
    d_input = torch.empty_like(gate_and_up)
    d_gate, d_up = d_input.unbind(-2)
    torch.mul(activation(gate), d_out, out=d_up)
    backward(d_out * up, gate, grad_input=d_gate)
    return d_input


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


class SwigluFunction(KernelFunction):
    """``silu(gate) · up``."""

    output, gradient = swiglu, swiglu_gradient


class GegluFunction(KernelFunction):
    """``gelu(gate) · up``."""

    output, gradient = geglu, geglu_gradient


class SiluFunction(TorchFunction):
    """``silu(x)``. Only the input is saved."""

    @staticmethod
    def in_torch(x):
        return F.silu(x)

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return elementwise(x)

    @staticmethod
    def backward(ctx, d_out):
        return elementwise(d_out, *ctx.saved_tensors)


def silu(x: Tensor) -> Tensor:
    """Return ``x · sigmoid(x)``, saving ``x`` only."""
    return SiluFunction.apply(x)


def gelu_of_biased(x: Tensor, bias: Tensor) -> Tensor:
    """Return ``gelu(x)``, and compute the gradient of ``bias``, which a linear layer has added to ``x``."""
    return GeluFunction.apply(x, bias)


@kernel(lambda x, *_: x.like(), fused=True)
def dropped(x, rows, offset: int, p: float):
    """Return ``x / (1 - p)`` where ``random.keep_mask`` keeps an element of ``x`` [*rows, columns], else 0."""
    return torch.where(random.keep_mask(rows, x.shape[-1], offset, p), x / (1 - p), 0)


@kernel(lambda samples, *_: samples.like())
def row_keys(samples, places, key: int):
    """Return the key of each row's mask, int64, from the sample of the row and its position in the sample."""
    return random.fold(random.fold(key, samples), places)


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
    """Dropout of [tokens, features over ``axis``] with probability ``p``, in forwards of training.

    gpt4d.model.module sets the layer's ``key`` from the seed and the layer's name.
    """

    p: float
    axis: str = "y"

    def prepare(self, layer: BoundLayer) -> None:
        layer.key = 0

    def forward(self, layer: BoundLayer, x: Tensor, tokens: TokenIndex) -> Tensor:
        return self.drop(layer, x, tokens) if layer.current_pass.records else x

    def drop(self, layer: BoundLayer, x: Tensor, tokens: TokenIndex) -> Tensor:
        """Drop elements of ``x`` in any pass: the recomputation of a product's input belongs to none."""
        if self.p == 0:
            return x
        rows = row_keys(tokens.samples, tokens.places, layer.key)
        return DropoutFunction.apply(x, rows, layer.context.grid[self.axis].index * x.shape[-1], self.p)
