"""SwiGLU (Shazeer, 2020)."""

import torch
import torch.nn.functional as F

from gpt4d.parallel.fusion import fused


class GatedFunction(torch.autograd.Function):
    """``silu(gate) · up`` of ``[..., 2, features]``. Only the input is kept."""

    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        return _gated(*gate_and_up.unbind(-2))

    @staticmethod
    def backward(ctx, d_out):
        (gate_and_up,) = ctx.saved_tensors
        return _gradient(d_out, gate_and_up)


@fused
def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).mul_(up)


@fused
def _gradient(d_out: torch.Tensor, gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.unbind(-2)
    if torch.compiler.is_compiling():  # torch.compile does not take results that are parts of a tensor
        return torch.stack((torch.ops.aten.silu_backward(d_out * up, gate), F.silu(gate) * d_out), -2)
    d_input = torch.empty_like(gate_and_up)
    d_gate, d_up = d_input.unbind(-2)
    torch.mul(F.silu(gate), d_out, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_out * up, gate, grad_input=d_gate)
    return d_input


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) · up``, [..., features], of the two [..., 2, features] side by side."""
    return GatedFunction.apply(gate_and_up)
