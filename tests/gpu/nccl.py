"""The NCCL library that this process has loaded, and its settings for ranks that share a GPU."""

import ctypes
import re
from pathlib import Path

import torch

from tests.gpu.check import NotPossible

_SHARES_GPU = (2, 30)  # oldest version that lets several ranks use one GPU
# Variables of a rank that shares its GPU with other ranks.
SHARED_GPU_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # NVLink switches connect different GPUs
    # The kernels of all ranks must fit on the GPU at once: a collective ends when each rank's kernel has run.
    "NCCL_MAX_CTAS": "2",
}
_LIBRARY = re.compile(r"^.*\s(/\S*/lib[nr]ccl\.so\S*)$", re.MULTILINE)  # rccl: AMD's library with the same functions


def loaded_version(maps: Path = Path("/proc/self/maps")) -> tuple[int, ...]:
    """Return the version of NCCL that this process (its ``maps``) has loaded, which may be newer than that of torch."""
    library = _LIBRARY.search(maps.read_text())
    if library is None:  # linked into torch
        return torch.cuda.nccl.version()
    number = ctypes.c_int()
    if error := ctypes.CDLL(library[1]).ncclGetVersion(ctypes.byref(number)):
        raise RuntimeError(f"{library[1]}: ncclGetVersion returns the error {error}")
    return decoded(number.value)


def decoded(number: int) -> tuple[int, ...]:
    """Return the version that ``ncclGetVersion`` encodes as 23007: 2.30.7. Until 2.8 it had a digit less: 2804."""
    unit = 1000 if number < 10_000 else 10_000
    return number // unit, number % unit // 100, number % 100


def require_shared_gpu(version: tuple[int, ...]) -> None:
    """Raise NotPossible if this version does not let several ranks use one GPU."""
    if version < _SHARES_GPU:
        raise NotPossible(
            f"several ranks on one GPU need NCCL 2.30, and torch has loaded {'.'.join(map(str, version))}; use several "
            "GPUs, or install a newer nvidia-nccl wheel"
        )
