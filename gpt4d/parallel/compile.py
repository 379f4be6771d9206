"""Pure functions of tensors that torch.compile fuses if ``train.compile`` is set.

Layers call them inside their autograd functions. Collectives, the sharded weights and the order of the backward are not
compiled. So compilation does not change the communication, and changes only the last bits of results.
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
    """Enable or disable compilation in this process. None: enable it on a GPU if its compilers are installed.

    Raises ConfigError if ``choice`` is true but a compiler is missing, and NodeError if this node has no private
    directory for compiled code.
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


def is_enabled() -> bool:
    """Return whether functions are compiled."""
    return _enabled


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function``, compiled if enabled. It is compiled at its first call for each set of dtypes and ranks."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _enabled or torch.compiler.is_compiling():  # is_compiling: the calling function is being compiled
            return function(*args, **kwargs)
        if function not in _compiled:
            _compiled[function] = torch.compile(function)  # torch limits the number of recompilations for new shapes
        return _compiled[function](*args, **kwargs)

    return call
