"""Pure functions of tensors that torch.compile fuses if ``train.compile`` is set.

Layers call them inside their autograd functions. Collectives, the sharded weights and the order of the backward are not
compiled. So compilation does not change the communication, and changes only the last bits of results.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec, TypeVar

from gpt4d.config import ConfigError
from gpt4d.parallel.lazy import torch
from gpt4d.runtime import compile_cache
from gpt4d.runtime.errors import warn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Variants of a function for other dtypes and shapes. torch's default of 8 is not enough for a U-Net.
_MAX_VARIANTS = 64

enabled = False  # whether functions are compiled
_options: dict[str, int] = {}
compiled: dict[Callable, Callable] = {}  # functions that have been called with these options


def enable(choice: bool | None, device: torch.device, replicates: bool = False) -> None:
    """Enable or disable compilation in this process. All ranks of the job must call this.

    None: enable it on a GPU if every rank can compile, and print a warning otherwise.

    Args:
        choice: ``train.compile``.
        device: the rank's device.
        replicates: ranks compute equal values from equal inputs, and must get the same bits. Every rank then compiles a
            reduction in the same way. Otherwise each rank measures which way is the fastest.

    Raises:
        ConfigError: on all ranks if ``choice`` is true but a rank cannot compile.
        NodeError: if this node has no private directory for compiled code.
    """
    global enabled, _options
    enabled, _options = False, options_of(replicates)
    compiled.clear()
    if choice is False or (choice is None and device.type != "cuda"):
        return
    problem = missing_compiler(device)
    if problem is None:
        compile_cache.set_environment()
        problem = _failure(device)
    problem = _first_of_all_ranks(problem)
    if problem is None:
        from torch._dynamo import config  # takes seconds

        config.recompile_limit = _MAX_VARIANTS
        enabled = True
    elif choice:
        raise ConfigError(f"train.compile=true: {problem}, or use train.compile=false")
    elif not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        warn(f"train.compile=null: {problem}, or use train.compile=false; this run trains without compiled functions")


def options_of(replicates: bool) -> dict[str, int]:
    """Return the options of torch.compile. ``replicates``: as for ``enable``."""
    # An intermediate result that depends on up to 16 tensors is recomputed instead of written to memory.
    options: dict[str, int] = {"realize_reads_threshold": 16}
    return options | {"deterministic": True} if replicates else options


def missing_compiler(device: torch.device) -> str | None:
    """Return which compiler is missing for a device, with its remedy, or None."""
    on_gpu = device.type == "cuda"
    compilers = [os.environ.get("CC"), "gcc", "clang"] if on_gpu else [os.environ.get("CXX"), "g++", "clang++"]
    found = any(name and shutil.which(name) for name in compilers) and (not on_gpu or find_spec("triton") is not None)
    missing = "the package triton and a C compiler; install them" if on_gpu else "a C++ compiler; install g++"
    return None if found else f"needs {missing}"


def _failure(device: torch.device) -> str | None:
    """Compile a small function and return why that fails, or None."""
    try:
        torch.compile(_increased, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:  # the compilers raise errors of many classes
        if not (Path(sysconfig.get_config_var("INCLUDEPY")) / "Python.h").exists():
            return "needs Python.h; install Python's headers, such as the package python3-dev"
        message = " ".join(str(error).split("\n\n")[0].split())
        return f"a test function cannot be compiled ({message}); repair the compilers"
    return None


def _increased(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _first_of_all_ranks(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, with its number, or None."""
    if not torch.distributed.is_initialized():
        return problem
    from gpt4d.runtime.consensus import all_gather_json

    problems = all_gather_json(problem, "testing the compilers")
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)


@contextmanager
def disabled() -> Iterator[None]:
    """Call functions without compilation in the body. Each new length of a text would compile all of them again."""
    global enabled
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function``, compiled if enabled. It is compiled at its first call for each set of dtypes and ranks.

    It is compiled into one graph: an operation that torch.compile does not support raises an error.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not enabled or torch.compiler.is_compiling():  # is_compiling: the calling function is being compiled
            return function(*args, **kwargs)
        if function not in compiled:
            compiled[function] = torch.compile(function, fullgraph=True, options={**_options})
        return compiled[function](*args, **kwargs)

    return call
