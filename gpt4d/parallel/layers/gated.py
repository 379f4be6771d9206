"""SwiGLU (Shazeer, 2020)."""

import torch
import torch.nn.functional as F


class GatedFunction(torch.autograd.Function):
    """``silu(gate) · up`` of ``[..., 2, features]``. Only the input is kept, and its gradient is written in place."""

    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.unbind(-2)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, d_out):
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.unbind(-2)
        d_input = torch.empty_like(gate_and_up)
        d_gate, d_up = d_input.unbind(-2)
        torch.mul(F.silu(gate), d_out, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_out * up, gate, grad_input=d_gate)
        return d_input


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) · up``, [..., features], of the two [..., 2, features] side by side."""
    return GatedFunction.apply(gate_and_up)
