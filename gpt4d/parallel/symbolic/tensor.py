"""Tensors without values: shapes and dtypes, from which the planner derives times and bytes. No torch here.

They have the methods of torch tensors that layers call. As in torch, the memory of a tensor is released when Python
releases the last tensor that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

# Bytes of an element, by the name of a dtype.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
ITEMSIZE |= dict.fromkeys(("uint8", "float8_e4m3fn", "float8_e5m2"), 1)


class Computation(NamedTuple):
    """A product, or elementwise operations.

    Attributes:
        flops: floating-point operations of a product.
        moved: bytes read and written.
        operations: number of operations.
        attention: FLOPs without masked products, if the product is attention.
        float8: the factors of the product are float8.
        copied: bytes read and written before or after the product.
        head_size: size of a head, if the product is attention.
    """

    flops: float = 0.0
    moved: float = 0.0
    operations: int = 1
    attention: float | None = None
    float8: bool = False
    copied: float = 0.0
    head_size: int = 0


class SymbolicDevice(Protocol):
    """A device that accounts for time and memory. Sizes are in bytes."""

    compiled: bool  # torch.compile fuses elementwise functions
    is_cpu: bool
    plans: dict[tuple, Any]  # cached costs and results of kernel calls
    numbers: Iterator[int]  # numbers of the nodes in the autograd graph, in the order of their creation
    records: bool  # calls are recorded for a backward
    recomputation: Any  # replaces saved tensors within blocks that are recomputed
    imbalance: float  # rows that the busiest rank's experts receive, divided by the mean

    def compute(self, computation: Computation) -> None:
        """Account for a product or elementwise operations."""

    def hold(self, nbytes: int) -> None:
        """Allocate memory."""

    def release(self, nbytes: int) -> None:
        """Free memory."""

    def scratch(self, nbytes: float) -> None:
        """Allocate memory and free it at once."""


def wide_dtype(tensor: SymbolicTensor) -> str:
    """Return the dtype of a tensor's statistics: float32, or float64 for a float64 tensor."""
    return "float64" if tensor.dtype == "float64" else "float32"


class Storage:
    """Memory of a device, which is freed with the last tensor that uses it."""

    __slots__ = ("device", "nbytes")

    def __init__(self, device: SymbolicDevice, nbytes: int):
        self.device, self.nbytes = device, nbytes
        device.hold(nbytes)

    def __del__(self) -> None:
        self.device.release(self.nbytes)


class SymbolicTensor:
    """A tensor without values. Its dtype is a name in ``ITEMSIZE``.

    Attributes:
        storage: the tensor's memory; None if it is not allocated, or not counted. ``new`` allocates it.
        edge: the node that takes the tensor's gradient, and the index among the node's outputs; None if the tensor
            requires no gradient.
    """

    __slots__ = ("__weakref__", "device", "dtype", "edge", "shape", "storage")

    def __init__(
        self,
        device: SymbolicDevice,
        shape: tuple[int, ...],
        dtype: str,
        storage: Storage | None = None,
        edge: tuple[Any, int] | None = None,
    ):
        self.device, self.shape, self.dtype, self.storage, self.edge = device, shape, dtype, storage, edge

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def is_cpu(self) -> bool:
        return self.device.is_cpu

    @property
    def grad_fn(self) -> Any:
        """The node that has computed the tensor; None for a parameter, and if the tensor requires no gradient."""
        return None if self.edge is None or self.edge[0].accumulates else self.edge[0]

    def like(self, shape: Sequence[int] | None = None, dtype: str | None = None) -> SymbolicTensor:
        """Return a tensor without memory on the same device, by default with the same shape and dtype."""
        return SymbolicTensor(self.device, self.shape if shape is None else tuple(shape), dtype or self.dtype)

    def new(self) -> SymbolicTensor:
        """Return a new tensor of this shape and dtype, with its own memory."""
        return SymbolicTensor(self.device, self.shape, self.dtype, Storage(self.device, self.nbytes))

    def alias(self, edge: tuple[Any, int] | None = None, shape: tuple[int, ...] | None = None) -> SymbolicTensor:
        """Return a tensor with the same memory, whose gradient goes to ``edge``."""
        return SymbolicTensor(self.device, self.shape if shape is None else shape, self.dtype, self.storage, edge)

    def detach(self) -> SymbolicTensor:
        return self.alias()

    # ------------------------------------------------------------------------------------------------- views

    def view(self, shape: tuple[int, ...]) -> SymbolicTensor:
        assert math.prod(shape) == math.prod(self.shape), f"{shape} is not a view of {self.shape}"
        from gpt4d.parallel.symbolic.tape import view

        return view(self, shape)

    def view_as(self, other: SymbolicTensor) -> SymbolicTensor:
        return self.view(other.shape)

    def flatten(self, first: int = 0, last: int = -1) -> SymbolicTensor:
        first, last = first % len(self.shape), last % len(self.shape)
        size = math.prod(self.shape[first : last + 1])
        return self.view((*self.shape[:first], size, *self.shape[last + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> SymbolicTensor:
        dim %= len(self.shape)
        known = math.prod(size for size in sizes if size != -1)
        found = (self.shape[dim] // known if size == -1 else size for size in sizes)
        return self.view((*self.shape[:dim], *found, *self.shape[dim + 1 :]))

    def unsqueeze(self, dim: int) -> SymbolicTensor:
        dim %= len(self.shape) + 1
        return self.view((*self.shape[:dim], 1, *self.shape[dim:]))

    def squeeze(self, dim: int) -> SymbolicTensor:
        dim %= len(self.shape)
        return self.view((*self.shape[:dim], *self.shape[dim + 1 :]))

    def transpose(self, one: int, other: int) -> SymbolicTensor:
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return self.view(tuple(shape))

    def contiguous(self) -> SymbolicTensor:
        return self

    def unbind(self, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        from gpt4d.parallel.symbolic.tape import parts

        dim %= len(self.shape)
        return parts(self, [(*self.shape[:dim], *self.shape[dim + 1 :])] * self.shape[dim])

    def chunk(self, count: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        from gpt4d.parallel.symbolic.tape import parts

        dim %= len(self.shape)
        return parts(self, [(*self.shape[:dim], self.shape[dim] // count, *self.shape[dim + 1 :])] * count)

    def __add__(self, other: SymbolicTensor) -> SymbolicTensor:
        from gpt4d.parallel.symbolic.tape import add

        return add(self, other)

    def __getitem__(self, index: int) -> SymbolicTensor:
        return self.unbind()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return True
