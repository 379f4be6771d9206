"""The environment of CUDA and NCCL, which read it once, before a process group exists, and the GPU of a thread."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gpt4d.runtime.errors import ConfigError
from gpt4d.runtime.machine import AMD_DRIVER

if TYPE_CHECKING:
    import torch

_ENVIRONMENT = {
    # One hardware queue per stream. In a shared queue, collectives of different communicators wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GPU_MAX_HW_QUEUES": "16",  # AMD's name; its default is 4
    # The GPU schedules a collective's blocks before the blocks of a computation that was launched earlier.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # With expandable segments, buffers that NCCL registers for a CUDA graph become invalid.
    "NCCL_GRAPH_REGISTER": "0",
    # gpt4d's watchdog ends the job and reports the cause. torch's watchdog aborts the process earlier, on errors of
    # NCCL and of CUDA.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products that add in a fixed order
    "NCCL_NVLS_ENABLE": "0",  # NVLink switches do not
}
# Otherwise fragments make torch reserve more memory than it allocates, and the planner fills a GPU. Not on AMD's GPUs,
# where torch supports it only with recent drivers.
_ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_MIN_TIMEOUT_S = 1800.0
_MAX_COMPILE_WORKERS = 4


def set_environment(
    deterministic: bool = False, trace_dir: Path | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables that ``environment`` lacks. Raises ConfigError for one that gpt4d cannot work with.

    Args:
        deterministic: use only algorithms that give the same bits in every run.
        trace_dir: existing directory for torch's record of the last collectives when NCCL reports an error.
        environment: the variables.
    """
    for name in _BLOCKING_WAIT:
        if environment.get(name, "0").lower() not in ("", "0", "false", "no", "n"):
            raise ConfigError(
                f"{name}={environment[name]}: makes the host wait for each collective, so that no collective overlaps "
                "the computation; unset it"
            )
    defaults = _ENVIRONMENT | (_DETERMINISTIC if deterministic else {})
    if trace_dir:
        defaults["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(trace_dir / "nccl_trace_rank_")
    if sys.platform == "linux" and environment.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP":  # no other supports it
        # Ranks connect by gloo when they first communicate. By default, each rank of a group connects to all others.
        defaults["TORCH_GLOO_LAZY_INIT"] = "1"
    if not os.path.exists(AMD_DRIVER) and not any(name in environment for name in _ALLOCATOR_NAMES):
        defaults[_ALLOCATOR_NAMES[0]] = _ALLOCATOR
    for name, value in defaults.items():
        environment.setdefault(name, value)


def share_cores(cores: int, local_world_size: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """Return the cores for each of the tasks on this node, and limit its compiling processes if the user does not.

    By default, each task starts up to 32 compiling processes.
    """
    own = max(1, cores // local_world_size)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MAX_COMPILE_WORKERS, own)))
    return own


def check_cuda_graphs() -> None:
    """Raise ConfigError if this process has no GPU that can run ``train.cuda_graphs``."""
    import torch

    if torch.version.hip or not torch.cuda.is_available():
        found = "a GPU of AMD, on which nobody has tested it" if torch.version.hip else "no GPU"
        raise ConfigError(f"train.cuda_graphs=true: this machine has {found}; leave it out")


def backend_timeout(timeout_s: float) -> timedelta:
    """Return the timeout of torch's own watchdogs, much longer than the timeout of gpt4d's watchdog."""
    return timedelta(seconds=max(_MIN_TIMEOUT_S, 2 * timeout_s))


def select(device: torch.device) -> None:
    """Select the rank's GPU for the calling thread, which otherwise uses GPU 0 and creates a context there.

    Call it first in each thread that may call CUDA. It does nothing for a CPU.
    """
    if device.type != "cpu":
        import torch

        torch.cuda.set_device(device)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB, on its GPU or, without a GPU, on the host."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def used_memory_gib(device: torch.device) -> float | None:
    """Return the current memory of this process in GiB, on GPU or host; None if the system does not report it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device) / 2**30
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
