"""The kernels of activation functions and of dropout."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from gpt4d.parallel import random

_ROWS = 128  # rows per partial sum: with them, torch.compile needs no second pass over the gradients


def gelu(x):
    """Apply ``F.gelu`` with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu_gradients(d_out, x, bias):
    """Return the gradients of ``x`` [tokens, features] and of ``bias``, summed in the dtype of ``bias``."""
    backward, shape = torch.ops.aten.gelu_backward, bias.shape
    if len(x) % _ROWS or len(x) == _ROWS:
        d_x = backward(d_out, x, approximate="tanh")
        return d_x, d_x.sum(0, dtype=bias.dtype).view(shape)
    d_x = backward(d_out.unflatten(0, (-1, _ROWS)), x.unflatten(0, (-1, _ROWS)), approximate="tanh")
    return d_x.flatten(0, 1), d_x.sum(1, dtype=bias.dtype).sum(0).view(shape)


def silu(x):
    """Apply ``F.silu``."""
    return F.silu(x)


def swiglu(gate_and_up):
    """Return ``silu(gate) · up`` of [..., 2, features]."""
    return _gated(gate_and_up, F.silu)


def swiglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``swiglu``, [..., 2, features]."""
    return _gated_gradient(d_out, gate_and_up, F.silu, torch.ops.aten.silu_backward)


def geglu(gate_and_up):
    """Return ``gelu(gate) · up`` of [..., 2, features], with the tanh approximation."""
    return _gated(gate_and_up, gelu)


def geglu_gradient(d_out, gate_and_up):
    """Return the gradient of the input of ``geglu``, [..., 2, features]."""
    return _gated_gradient(d_out, gate_and_up, gelu, partial(torch.ops.aten.gelu_backward, approximate="tanh"))


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


def dropped(x, rows, offset: int, p: float):
    """Return ``x / (1 - p)`` where the mask keeps ``x`` [*rows, columns], else 0."""
    return torch.where(random.keep_mask(rows, x.shape[-1], offset, p), x / (1 - p), 0)


def row_keys(samples, places, key: int):
    """Return one int64 key per row: ``key`` folded with the sample, then with the position."""
    return random.fold(random.fold(key, samples), places)
