"""Rotary position embedding (Su et al., 2021)."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from gpt4d.parallel.fusion import fused
from gpt4d.parallel.layers.tokens import Tokens


@fused
def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    if torch.compiler.is_compiling():  # torch.compile does not take results that are parts of a tensor
        first, second = x.chunk(2, -1)
        one, other = first * cos - direction * second * sin, second * cos + direction * first * sin
        return torch.cat((one, other), -1).to(x.dtype)
    wide = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    (first, second), (new_first, new_second) = x.chunk(2, -1), wide.chunk(2, -1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return wide.to(x.dtype)


class RotationFunction(torch.autograd.Function):
    """Pairs of features [..., heads, 2·pairs] rotated by angles of which ``cos`` and ``sin`` are given."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, d_out):
        cos, sin = ctx.saved_tensors
        return _rotated(d_out, cos, sin, -1), None, None


class Rotary:
    """Rotates the features of a head in pairs, ``size/2`` apart, by angles proportional to the token's position.

    Layers that share it compute the angles once for the tokens of each microbatch.

    Args:
        frequencies: angle of each pair per position, in radians.
        scale: factor of the rotated features.
    """

    def __init__(self, frequencies: Sequence[float], scale: float = 1.0):
        self.frequencies, self.scale = tuple(frequencies), scale
        self._rotations: WeakKeyDictionary[Tokens, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()

    def __call__(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return ``x`` [batch, sequence, heads, size] rotated, computed in float32, or float64 for float64."""
        return RotationFunction.apply(x, *self._rotation(tokens, x))

    def _rotation(self, tokens: Tokens, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [batch, sequence, 1, pairs]."""
        if tokens not in self._rotations:
            dtype = torch.promote_types(x.dtype, torch.float32)
            frequencies = torch.tensor(self.frequencies, dtype=dtype, device=x.device)
            angles = tokens.positions[..., None, None] * frequencies
            self._rotations[tokens] = angles.cos() * self.scale, angles.sin() * self.scale
        return self._rotations[tokens]
