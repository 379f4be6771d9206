"""Kernels, and functions with a gradient, from which layers are built.

A kernel has two definitions: the shapes of its results, from which the planner derives its time, and torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import update_wrapper
from inspect import signature
from typing import Any, ClassVar, Protocol, Self

from gpt4d.parallel import compile
from gpt4d.parallel.lazy import torch

BLOCK_ELEMENTS = 1 << 22  # 16 MiB of float32, for a CPU
GPU_BLOCK_ELEMENTS = 1 << 28  # few blocks, because the host starts several kernels for each


class Tensor(Protocol):
    """A tensor of torch, or a symbolic tensor: the members that functions and layers use on both."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def is_cpu(self) -> bool: ...
    @property
    def grad_fn(self) -> object: ...
    def __add__(self, other: Self, /) -> Tensor: ...
    def chunk(self, count: int, dim: int = 0, /) -> tuple[Tensor, ...]: ...
    def contiguous(self) -> Tensor: ...
    def detach(self) -> Tensor: ...
    def flatten(self, first: int = 0, last: int = -1, /) -> Tensor: ...
    def squeeze(self, dim: int, /) -> Tensor: ...
    def transpose(self, one: int, other: int, /) -> Tensor: ...
    def unbind(self, dim: int = 0, /) -> tuple[Tensor, ...]: ...
    def unflatten(self, dim: int, sizes: Sequence[int], /) -> Tensor: ...
    def unsqueeze(self, dim: int, /) -> Tensor: ...
    def view(self, shape: tuple[int, ...], /) -> Tensor: ...
    def view_as(self, other: Self, /) -> Tensor: ...


class Symbolic:
    """A tensor without values (gpt4d.parallel.symbolic), on which kernels and functions only cost time and memory."""

    __slots__ = ()
    device: Any
    dtype: str
    shape: tuple[int, ...]
    run_kernel: Callable[[Kernel, tuple], Any]  # returns the results of a kernel whose first argument is this tensor
    run_function: Callable[[type[Function], tuple], Any]  # returns the results of a function


def wide_dtype(tensor: Symbolic) -> str:
    """Return the dtype of a symbolic tensor's statistics: float32, or float64 for a float64 tensor."""
    return "float64" if tensor.dtype == "float64" else "float32"


def block_rows(columns: int) -> int:
    """Return the number of rows of a matrix with ``columns`` columns that a CPU converts to float32 at a time."""
    return max(1, BLOCK_ELEMENTS // max(1, columns))


def num_blocks(matrix: Tensor, compiled: bool) -> int:
    """Return the number of equal blocks of rows in which an elementwise kernel converts a matrix to float32.

    Blocks limit the memory of the converted values, which a ``compiled`` kernel on a GPU does not store.
    """
    rows, columns = matrix.shape
    if matrix.is_cpu:
        return -(-rows // block_rows(columns))
    return 1 if compiled else -(-rows // max(1, GPU_BLOCK_ELEMENTS // columns))


class Kernel:
    """A function of tensors without a gradient or a collective. Its first argument is a tensor.

    On symbolic tensors it takes the time of reading its arguments and writing its results, or, if it is not compiled,
    the time that gpt4d.parallel.symbolic.costs records.

    Args:
        in_torch: computes the results of torch tensors.
        shapes: maps symbolic arguments to the results, new tensors or arguments that are overwritten.
        fused: torch.compile fuses the kernel into one operation.
        blocks: maps the arguments to the number of blocks that the kernel processes. torch.compile fuses each block
            into one operation.
        flops: maps the arguments to the floating-point operations of a product.
        float8: the factors of the product are float8.
        attention: maps the arguments of attention to the floating-point operations without masked products.
        moved: maps the arguments to the bytes read and written, for a kernel that does not read complete arguments.
        unread: names of the arguments whose shape or dtype the kernel uses, but not the values.
        copied: maps the arguments to the bytes that a product reads and writes before or after it multiplies.
        temporary: maps the arguments to the bytes of temporary tensors, for a kernel without recorded costs.
        converts: the kernel converts the dtype, and takes no time if the first argument already has the dtype.
        free: the kernel takes no time, and its results take no memory.
    """

    def __init__(
        self,
        in_torch: Callable,
        shapes: Callable,
        fused: bool = False,
        blocks: Callable[..., int] | None = None,
        flops: Callable[..., float] | None = None,
        float8: bool = False,
        attention: Callable[..., float] | None = None,
        moved: Callable[..., float] | None = None,
        unread: Collection[str] = (),
        copied: Callable[..., float] | None = None,
        temporary: Callable[..., float] | None = None,
        converts: bool = False,
        free: bool = False,
    ):
        self.in_torch, self.shapes, self.fused, self.blocks = in_torch, shapes, fused, blocks
        self.flops, self.float8, self.attention = flops, float8, attention
        self.moved, self.copied, self.temporary = moved, copied, temporary
        self.converts, self.free = converts, free
        self.name = f"{in_torch.__module__.rpartition('.')[2]}.{in_torch.__name__}"
        self.unread = [index for index, name in enumerate(signature(in_torch).parameters) if name in unread]
        self._run = compile.fused(in_torch) if fused else in_torch
        update_wrapper(self, in_torch)

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[0], Symbolic):
            return args[0].run_kernel(self, args)
        return self._run(*args)


class PlannedKernel(Kernel):
    """A kernel that torch runs inside a ``TorchFunction``: costs and shapes of results, without torch code."""


def kernel(shapes: Callable, **options: Any) -> Callable[[Callable], Kernel]:
    """Decorate the torch code of a kernel with the shapes of its results. Options as for ``Kernel``."""
    return lambda in_torch: Kernel(in_torch, shapes, **options)


def planned_kernel(shapes: Callable | None = None, **options: Any) -> Any:
    """Declare a planned kernel by the shapes of its results. Options as for ``Kernel``."""
    return PlannedKernel(shapes, shapes) if shapes else lambda function: PlannedKernel(function, function, **options)


@planned_kernel
def elementwise(x, *others):
    """Return the result of a function of each element, in the shape and dtype of ``x``."""
    return x.like()


class Function:
    """A function with a gradient: a torch.autograd.Function, in a module that does not import torch.

    ``forward`` and ``backward`` are static or class methods. Their first argument after ``ctx`` is a tensor. Second
    derivatives raise an error.
    """

    forward: Callable
    backward: Callable

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call ``forward`` and record the call for the backward."""
        if isinstance(args[0], Symbolic):
            return args[0].run_function(cls, args)
        return (_in_torch.get(cls) or _load(cls))(*args)


class KernelFunction(Function):
    """A kernel of tensors, whose gradients another kernel computes from ``d_out`` and these tensors."""

    output: ClassVar[Kernel]
    gradient: ClassVar[Kernel]

    @classmethod
    def forward(cls, ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return cls.output(*tensors)

    @classmethod
    def backward(cls, ctx, d_out):
        return cls.gradient(d_out, *ctx.saved_tensors)


class TorchFunction(Function):
    """A function whose gradient torch's autograd computes.

    On torch tensors it calls ``in_torch``, a static method. ``forward`` and ``backward`` serve the planner and consist
    of planned kernels. They have the same results and saved tensors as ``in_torch``.
    """

    in_torch: Callable

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if isinstance(args[0], Symbolic):
            return args[0].run_function(cls, args)
        return cls.in_torch(*args)


_in_torch: dict[type[Function], Callable] = {}  # ``apply`` in torch of each function that has been called


def _load(function: type[Function]) -> Callable:
    """Define a function as a torch.autograd.Function, and return its ``apply``."""
    once, differentiable = function.backward, torch.autograd.function.once_differentiable(function.backward)

    def backward(ctx: Any, *gradients: Any) -> Any:
        return (differentiable if torch.is_grad_enabled() else once)(ctx, *gradients)

    methods = {"forward": staticmethod(function.forward), "backward": staticmethod(backward)}
    torch_function: Any = type(function.__name__, (torch.autograd.Function,), {**methods, "__doc__": function.__doc__})
    # torch.autograd.Function.apply first unwraps the tensors of functorch's transforms, which no layer supports. The
    # base class raises an error within such a transform.
    _in_torch[function] = apply = super(torch.autograd.Function, torch_function).apply
    return apply
