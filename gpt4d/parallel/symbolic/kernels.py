"""Kernels, and functions with a gradient, from which layers are built. No torch here.

A kernel has two definitions: the shapes of its results, from which the planner derives its time, and torch code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cache, update_wrapper
from inspect import signature
from pathlib import Path
from typing import Any

from gpt4d.parallel import compile
from gpt4d.parallel.symbolic import tape
from gpt4d.parallel.symbolic.tensor import Computation, Storage, SymbolicDevice, SymbolicTensor

SUM, MAX = "sum", "max"  # operations of an all-reduce
BLOCK_ELEMENTS = 1 << 22  # 16 MiB of float32, for a CPU
GPU_BLOCK_ELEMENTS = 1 << 28  # few blocks, because the host starts several kernels for each
EAGER_COSTS = Path(__file__).with_name("eager.json")  # costs of kernels that are not compiled


class Function:
    """A function with a gradient: a torch.autograd.Function, in a module that does not import torch.

    ``forward`` and ``backward`` are static or class methods. Their first argument after ``ctx`` is a tensor. Second
    derivatives raise an error.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call ``forward`` and record the call for the backward."""
        if isinstance(args[0], SymbolicTensor):
            return tape.apply(cls, args)
        return (_in_torch.get(cls) or _load(cls))(*args)


class TorchFunction(Function):
    """A function whose gradient torch's autograd computes.

    On torch tensors it calls ``in_torch``, a static method. ``forward`` and ``backward`` serve the planner and consist
    of planned kernels. They have the same results and saved tensors as ``in_torch``.
    """

    in_torch: Callable[..., Any]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if isinstance(args[0], SymbolicTensor):
            return tape.apply(cls, args)
        return cls.in_torch(*args)


_in_torch: dict[type[Function], Callable[..., Any]] = {}  # ``apply`` in torch of each function that has been called


def _load(function: type[Function]) -> Callable[..., Any]:
    """Define a function as a torch.autograd.Function, and return its ``apply``."""
    import torch

    once, differentiable = function.backward, torch.autograd.function.once_differentiable(function.backward)

    def backward(ctx: Any, *gradients: Any) -> Any:
        return (differentiable if torch.is_grad_enabled() else once)(ctx, *gradients)

    methods = {"forward": staticmethod(function.forward), "backward": staticmethod(backward)}
    torch_function: Any = type(function.__name__, (torch.autograd.Function,), {**methods, "__doc__": function.__doc__})
    # torch.autograd.Function.apply first unwraps the tensors of functorch's transforms, which no layer supports. The
    # base class raises an error within such a transform.
    _in_torch[function] = apply = super(torch.autograd.Function, torch_function).apply
    return apply


def block_rows(columns: int) -> int:
    """Return the number of rows of a matrix with ``columns`` columns that a CPU converts to float32 at a time."""
    return max(1, BLOCK_ELEMENTS // max(1, columns))


def num_blocks(matrix: Any, compiled: bool) -> int:
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
    the time that ``EAGER_COSTS`` records.

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
        unread: names of the arguments of which the kernel uses only the shape or the dtype.
        copied: maps the arguments to the bytes that a product reads and writes before or after it multiplies.
        temporary: maps the arguments to the bytes of temporary tensors, for a kernel that is not in ``EAGER_COSTS``.
        converts: the kernel converts the dtype, and takes no time if the first argument already has the dtype.
        free: the kernel takes no time, and its results take no memory.
    """

    def __init__(
        self,
        in_torch: Callable[..., Any],
        shapes: Callable[..., Any],
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
        self._unread = [index for index, name in enumerate(signature(in_torch).parameters) if name in unread]
        self._run = compile.fused(in_torch) if fused else in_torch
        update_wrapper(self, in_torch)

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[0], SymbolicTensor):
            return self._plan(args)
        return self._run(*args)

    def _plan(self, args: tuple) -> Any:
        """Account for the time and the memory of a call on the device of its arguments; return its results."""
        device: SymbolicDevice = args[0].device
        key = self, *[(arg.shape, arg.dtype) if isinstance(arg, SymbolicTensor) else arg for arg in args]
        plan = device.plans.get(key)
        if plan is None:
            plan = device.plans[key] = self._cost(device, args)
        computation, temporary, results = plan
        returned = [
            args[one]
            if isinstance(one, int)
            else one and SymbolicTensor(device, one[0], one[1], None if self.free else Storage(device, one[2]))
            for one in results
        ]
        if temporary:
            device.scratch(temporary)
        device.compute(computation)
        return returned[0] if len(returned) == 1 else tuple(returned)

    def minimum_bytes(self, *args: Any) -> float:
        """Return the bytes of the symbolic arguments that are read and of the results."""
        if self.moved:
            return self.moved(*args)
        returned = self.shapes(*args)
        results = filter(None, returned if isinstance(returned, tuple) else (returned,))
        read = [arg for place, arg in enumerate(args) if place not in self._unread and isinstance(arg, SymbolicTensor)]
        return sum(tensor.nbytes for tensor in (*read, *results))

    def _cost(self, device: SymbolicDevice, args: tuple) -> tuple[Computation, float, list]:
        """Return the computation, the bytes of temporary tensors, and the results.

        A result is a tuple of shape, dtype and bytes, None, or the index of an argument that is returned.
        """
        returned = self.shapes(*args)
        results = returned if isinstance(returned, tuple) else (returned,)
        tensors, moved = [arg for arg in args if isinstance(arg, SymbolicTensor)], self.minimum_bytes(*args)
        places = [
            next((place for place, arg in enumerate(args) if arg is one), one and (one.shape, one.dtype, one.nbytes))
            for one in results
        ]
        if self.free or (self.converts and places == [0]):
            return Computation(operations=0), 0.0, places
        flops = self.flops(*args) if self.flops else 0.0
        attention = self.attention(*args) if self.attention else None
        head_size = next(one.shape[-1] for one in tensors if len(one.shape) == 4) if self.attention else 0
        blocks = self.blocks(*args) if self.blocks else 1
        key, compiled = f"{self.name} {args[0].dtype} {len(tensors)}", self.fused or self.blocks
        if (compiled and device.compiled) or (not compiled and key not in _eager_costs()):
            temporary = self.temporary(*args) if self.temporary else 0.0
            copied = self.copied(*args) if self.copied else 0.0
            return Computation(flops, moved, blocks, attention, self.float8, copied, head_size), temporary, places
        factor, operations, temporary = _eager_costs()[key]
        computation = Computation(flops, factor * moved, operations * blocks, attention, self.float8, 0.0, head_size)
        return computation, temporary * moved / blocks, places


class PlannedKernel(Kernel):
    """A kernel that torch runs inside a ``TorchFunction``: costs and shapes of results, without torch code."""


def kernel(shapes: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorate the torch code of a kernel with the shapes of its results. Options as for ``Kernel``."""
    return lambda in_torch: Kernel(in_torch, shapes, **options)


def planned_kernel(shapes: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Declare a planned kernel by the shapes of its results. Options as for ``Kernel``."""
    return PlannedKernel(shapes, shapes) if shapes else lambda function: PlannedKernel(function, function, **options)


@cache
def _eager_costs() -> dict[str, tuple[float, int, float]]:
    """Return the costs of kernels without torch.compile, by name, dtype and number of tensors.

    A cost consists of the bytes that the kernel moves, the number of its operations, and the bytes of its temporary
    tensors. Bytes are relative to ``Kernel.minimum_bytes``.
    """
    return json.loads(EAGER_COSTS.read_text())
