"""Pure functions of tensors that torch.compile turns into few kernels where ``train.compile`` asks for it.

Layers call them inside their autograd functions: collectives, the sharded weights and the order of the backward are
not compiled, so results and communication do not depend on it but for the last bits.
"""

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

from gpt4d.config import ConfigError
from gpt4d.runtime import compile_cache

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_enabled = False
_compiled: dict[Callable, Callable] = {}  # functions that have been called while it was enabled


def enable(choice: bool | None, device: torch.device) -> None:
    """Let functions of this process be compiled from now on, or not. None: on a GPU whose compilers are installed.

    Raises ConfigError if they should be, but a compiler is missing, and NodeError if this node has no private directory
    for them.
    """
    global _enabled
    on_gpu = device.type == "cuda"
    compilers = [os.environ.get("CC"), "gcc", "clang"] if on_gpu else [os.environ.get("CXX"), "g++", "clang++"]
    found = any(name and shutil.which(name) for name in compilers) and (not on_gpu or find_spec("triton") is not None)
    missing = "the package triton and a C compiler; install them" if on_gpu else "a C++ compiler; install g++"
    if choice and not found:
        raise ConfigError(f"train.compile=true: needs {missing}, or use train.compile=false")
    _enabled = on_gpu and found if choice is None else choice
    if _enabled:
        compile_cache.set_environment()


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function``, which is compiled at its first call with tensors of some dtypes and ranks, if enabled."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _enabled or torch.compiler.is_compiling():  # part of another one that is compiled
            return function(*args, **kwargs)
        if function not in _compiled:
            _compiled[function] = torch.compile(function)  # of too many different shapes, it compiles no further ones
        return _compiled[function](*args, **kwargs)

    return call
