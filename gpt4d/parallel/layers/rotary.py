"""Rotary position embedding (Su et al., 2021). No torch here."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from gpt4d.parallel.function import Function, kernel


@kernel(fused=True)
def rotated(x, cos, sin, direction: int):
    """Return pairs of features [..., heads, 2·pairs] rotated by angles, or, for ``direction`` -1, rotated back."""
    return x.like()


@kernel(unread=("like",))
def rotations(positions, like, frequencies: Sequence[float], scale: float):
    """Return the scaled cosines and sines of the angles, [batch, sequence, 1, pairs], at least float32."""
    shape = (*positions.shape, 1, len(frequencies))
    return tuple(positions.like(shape, "float64" if like.dtype == "float64" else "float32") for _ in range(2))


class RotationFunction(Function):
    """Pairs of features rotated by angles of which ``cos`` and ``sin`` are given."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, d_out):
        cos, sin = ctx.saved_tensors
        return rotated(d_out, cos, sin, -1), None, None


class Rotary:
    """Rotates the features of a head in pairs, ``size/2`` apart, by angles proportional to the token's position.

    Layers that share it compute the angles once for the tokens of each microbatch.

    Args:
        frequencies: angle of each pair per position, in radians.
        scale: factor of the rotated features.
    """

    def __init__(self, frequencies: Sequence[float], scale: float = 1.0):
        self.frequencies, self.scale = tuple(frequencies), scale
        self._rotations: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def __call__(self, x: Any, tokens: Any) -> Any:
        """Return ``x`` [batch, sequence, heads, size] rotated, computed in float32, or float64 for float64."""
        if tokens not in self._rotations:
            self._rotations[tokens] = rotations(tokens.positions, x, self.frequencies, self.scale)
        return RotationFunction.apply(x, *self._rotations[tokens])
