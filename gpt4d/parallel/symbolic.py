"""Tensors without values: shapes and dtypes, from which the planner derives times and bytes. No torch here."""

from __future__ import annotations

import math
from typing import Any, Protocol

# Bytes of an element, by the name of a dtype.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


class SymbolicDevice(Protocol):
    """A device that counts. Sizes are in bytes."""

    compiled: bool  # torch.compile fuses elementwise functions
    plans: dict[tuple, Any]  # the costs and results of calls of kernels

    def compute(self, flops: float = 0.0, moved: float = 0.0, operations: int = 1) -> None:
        """Compute a product of ``flops``, or elementwise ``operations``, that read and write ``moved`` bytes in all."""

    def scratch(self, nbytes: float) -> None:
        """Take memory for a moment."""


def wide_dtype(tensor: SymbolicTensor) -> str:
    """Return the dtype of statistics of a tensor: float32, or float64 for float64."""
    return "float64" if tensor.dtype == "float64" else "float32"


class SymbolicTensor:
    """A tensor without values. A dtype is a name in ``ITEMSIZE``."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, device: SymbolicDevice, shape: tuple[int, ...], dtype: str):
        self.device, self.shape, self.dtype = device, shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def like(self, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> SymbolicTensor:
        """Return another tensor on the same device."""
        return SymbolicTensor(self.device, self.shape if shape is None else shape, dtype or self.dtype)
