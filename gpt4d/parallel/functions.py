"""Functions with a gradient, from which layers are built. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpt4d.parallel.kernels import Symbolic
from gpt4d.parallel.lazy import torch


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
        if isinstance(args[0], Symbolic):
            return args[0].run_function(cls, args)
        return (_in_torch.get(cls) or _load(cls))(*args)


class TorchFunction(Function):
    """A function whose gradient torch's autograd computes.

    On torch tensors it calls ``in_torch``, a static method. ``forward`` and ``backward`` serve the planner and consist
    of planned kernels. They have the same results and saved tensors as ``in_torch``.
    """

    in_torch: Callable[..., Any]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if isinstance(args[0], Symbolic):
            return args[0].run_function(cls, args)
        return cls.in_torch(*args)


_in_torch: dict[type[Function], Callable[..., Any]] = {}  # ``apply`` in torch of each function that has been called


def _load(function: type[Function]) -> Callable[..., Any]:
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
