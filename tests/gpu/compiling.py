"""Compilation of fused kernels in a check's process."""

import sys
from functools import partial

import torch

from gpt4d.parallel import compile


def trace_only() -> None:
    """Let this process trace the functions that a GPU compiles, and not compile them, which takes a compiler."""
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    compile.missing_compiler = lambda device: None


def enable(device: torch.device) -> None:
    """Let this process compile fused kernels if it does not yet. On a CPU, trace them only."""
    if compile.enabled:
        return
    if device.type == "cpu":
        trace_only()
    compile.enable(True, device)


def num_graphs() -> int:
    """Return the number of functions that this process has compiled; a function counts once for each kind of input."""
    utils = sys.modules.get("torch._dynamo.utils")  # its import takes seconds, and torch.compile has imported it
    return utils.counters["stats"]["unique_graphs"] if utils else 0
