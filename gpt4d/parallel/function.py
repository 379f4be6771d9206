"""Kernels, and functions with a gradient, of which a layer consists. No torch here.

A kernel is written twice: as torch code, and as the shapes of its results. The planner derives the time of a kernel
from them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any

from gpt4d.parallel.symbolic import SymbolicDevice, SymbolicTensor

SUM, MAX = "sum", "max"  # operations of an all-reduce
EAGER_COSTS = Path(__file__).with_name("eager.json")  # costs of kernels that are not compiled


class Function:
    """A function with a gradient: a torch.autograd.Function, in a module that does not import torch.

    ``forward`` and ``backward`` are static methods. A second derivative is an error.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call ``forward`` and record the call for the backward."""
        if cls not in _in_torch:
            _in_torch[cls] = _torch_function(cls)
        return _in_torch[cls].apply(*args)


_in_torch: dict[type[Function], Any] = {}  # the torch.autograd.Function of each function that has been called


def _torch_function(function: type[Function]) -> Any:
    from torch.autograd import Function as TorchFunction
    from torch.autograd.function import once_differentiable

    backward = once_differentiable(function.backward)
    methods = {"forward": staticmethod(function.forward), "backward": staticmethod(backward)}
    return type(function.__name__, (TorchFunction,), {**methods, "__doc__": function.__doc__})


class Kernel:
    """A function of tensors without a gradient or a collective.

    On torch's tensors it is the function of the same name in the module ``<module>_kernels``. On symbolic tensors it
    takes the time to read its arguments and to write its results, or, if it is not compiled, the time that
    ``EAGER_COSTS`` records. The first argument is a tensor.

    Args:
        shapes: takes the arguments and returns the results, new tensors or arguments that are overwritten.
        fused: torch.compile makes one operation of it.
        blocks: takes the arguments and returns into how many blocks the kernel cuts them. torch.compile makes one
            operation of each.
    """

    def __init__(
        self,
        shapes: Callable[..., Any],
        fused: bool = False,
        blocks: Callable[..., int] | None = None,
    ):
        self.shapes, self.fused, self.blocks = shapes, fused, blocks
        self.name = f"{shapes.__module__.rpartition('.')[2]}.{shapes.__name__}"
        self._run: Callable[..., Any] | None = None
        update_wrapper(self, shapes)

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[0], SymbolicTensor):
            return self._plan(args)
        return (self._run or self._load())(*args)

    def _load(self) -> Callable[..., Any]:
        from gpt4d.parallel.fusion import fused

        module = importlib.import_module(f"{self.shapes.__module__}_kernels")
        function = getattr(module, self.shapes.__name__)
        self._run = fused(function) if self.fused else function
        return self._run

    def _plan(self, args: tuple) -> Any:
        """Take the time of a call on the device of its arguments. Equal arguments give the same results."""
        device, call = args[0].device, (self, args)
        if call not in device.plans:
            device.plans[call] = self._cost(device, args)
        temporary, moved, operations, returned = device.plans[call]
        if temporary:
            device.scratch(temporary)
        device.compute(0.0, moved, operations)
        return returned

    def _cost(self, device: SymbolicDevice, args: tuple) -> tuple[float, float, int, Any]:
        """Return the bytes of temporary tensors, the bytes moved, the number of operations, and the results."""
        returned = self.shapes(*args)
        results = returned if isinstance(returned, tuple) else (returned,)
        tensors = [arg for arg in args if isinstance(arg, SymbolicTensor)]
        moved = sum(tensor.nbytes for tensor in (*tensors, *filter(None, results)))
        blocks = self.blocks(*args) if self.blocks else 1
        key, compiled = f"{self.name} {args[0].dtype} {len(tensors)}", self.fused or self.blocks
        if (compiled and device.compiled) or (not compiled and key not in _eager_costs()):
            return 0.0, moved, blocks, returned
        factor, operations, temporary = _eager_costs()[key]
        return temporary * moved / blocks, factor * moved, operations * blocks, returned


def kernel(shapes: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Declare a kernel by the shapes of its results. Options as for ``Kernel``."""
    return Kernel(shapes) if shapes else lambda function: Kernel(function, **options)


@cache
def _eager_costs() -> dict[str, tuple[float, int, float]]:
    """Return the costs of kernels without torch.compile, by name, dtype and number of tensors.

    Each cost has the bytes that the kernel moves, its operations and the bytes of its temporary tensors. Both numbers
    of bytes are relative to the bytes of the arguments and results.
    """
    return json.loads(EAGER_COSTS.read_text())
