"""The kernels of elementwise functions."""

import torch
import torch.nn.functional as F

_ROWS = 128  # that are added up at once: torch.compile then needs no second pass over the gradients


def gelu(x):
    return F.gelu(x, approximate="tanh")


def gelu_gradients(d_out, x, bias):
    rows = _ROWS if len(x) % _ROWS == 0 else len(x)
    d_out, x = d_out.unflatten(0, (-1, rows)), x.unflatten(0, (-1, rows))
    d_x = torch.ops.aten.gelu_backward(d_out, x, approximate="tanh")
    return d_x.flatten(0, 1), d_x.sum(1, dtype=bias.dtype).sum(0).view(bias.shape)


def swiglu(gate_and_up):
    gate, up = gate_and_up.unbind(-2)
    return F.silu(gate).mul_(up)


def swiglu_gradient(d_out, gate_and_up):
    gate, up = gate_and_up.unbind(-2)
    if torch.compiler.is_compiling():  # torch.compile does not take results that are parts of a tensor
        return torch.stack((torch.ops.aten.silu_backward(d_out * up, gate), F.silu(gate) * d_out), -2)
    d_input = torch.empty_like(gate_and_up)
    d_gate, d_up = d_input.unbind(-2)
    torch.mul(F.silu(gate), d_out, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_out * up, gate, grad_input=d_gate)
    return d_input
