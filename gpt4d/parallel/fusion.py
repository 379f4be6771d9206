"""Pure functions of tensors that torch.compile turns into few kernels where ``train.compile`` asks for it.

Layers call them inside their autograd functions: collectives, the weight stream and the order of the backward stay
outside of what is compiled, so results and communication do not depend on it but for the last bits.
"""

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

from gpt4d.config import ConfigError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_enabled = False


def enable(choice: bool | None, device: torch.device) -> None:
    """Let functions of this process be compiled from now on, or not. None: on a GPU whose compiler is installed.

    Raises ConfigError if they should be, but the compiler is missing.
    """
    global _enabled
    if device.type == "cuda":
        found, missing = find_spec("triton") is not None, "the package triton; install it"
    else:
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        found, missing = any(name and shutil.which(name) for name in compilers), "a C++ compiler; install g++"
    if choice and not found:
        raise ConfigError(f"train.compile=true: needs {missing}, or use train.compile=false")
    _enabled = (device.type == "cuda" and found) if choice is None else choice


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function``, which is compiled at its first call with tensors of some dtypes and ranks, if enabled."""

    @functools.cache
    def compiled() -> Callable[Arguments, Result]:
        return torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (compiled() if _enabled else function)(*args, **kwargs)

    return call
