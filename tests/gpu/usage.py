"""Time of work on a device; memory, contexts and communicators that processes use; NCCL and its settings."""

import csv
import ctypes
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from gpt4d.planner.estimate import GIB
from tests.gpu.check import NotPossible

_COMMUNICATOR = re.compile(r"comm 0x[0-9a-f]+ rank \d+ nranks (\d+) .*Init COMPLETE")
_QUERY = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
_SHARES_GPU = (2, 30)  # oldest version that lets several ranks use one GPU
# Variables of a rank that shares its GPU with other ranks.
SHARED_GPU_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # NVLink switches connect different GPUs
    # The kernels of all ranks must fit on the GPU at once: a collective ends when each rank's kernel has run.
    "NCCL_MAX_CTAS": "2",
}
_LIBRARY = re.compile(r"^.*\s(/\S*/lib[nr]ccl\.so\S*)$", re.MULTILINE)  # rccl: AMD's library with the same functions


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Return the seconds of one call of ``work``, the mean of ``repeats`` calls after ``warm_up`` others."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def device_memory(device: torch.device) -> tuple[float, float]:
    """Return the GiB of a device's memory, and the GiB that all processes use, without a tensor also by a context."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total / GIB, (total - free) / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 0.0


def reserved_gib(device: torch.device, peak: bool = False) -> float:
    """Return the GiB that torch's allocator has reserved in this process, for tensors and for reuse."""
    if device.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_reserved if peak else torch.cuda.memory_reserved)(device) / GIB


def contexts(listed: str | None = None) -> Counter[str]:
    """Return the processes with a context on each GPU, by UUID; none if the driver, as in a container, reports none."""
    if listed is None:
        if not shutil.which(_QUERY[0]):
            return Counter()
        listed = subprocess.run(_QUERY, capture_output=True, text=True, check=True).stdout
    return Counter(gpu for gpu, _ in csv.reader(listed.splitlines(), skipinitialspace=True))


def logging_communicators(directory: Path) -> dict[str, str]:
    """Return the variables with which NCCL logs each communicator to a file per process in ``directory``."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(directory / "nccl.%p")}


def communicators(directory: Path, process: int) -> list[int]:
    """Return the number of ranks of each communicator that a process has created, from NCCL's log in ``directory``."""
    log = directory / f"nccl.{process}"
    return [int(ranks) for ranks in _COMMUNICATOR.findall(log.read_text())] if log.exists() else []


def nccl_version(maps: Path = Path("/proc/self/maps")) -> tuple[int, ...]:
    """Return the version of NCCL that this process (its ``maps``) has loaded, which may be newer than that of torch."""
    library = _LIBRARY.search(maps.read_text())
    if library is None:  # linked into torch
        return torch.cuda.nccl.version()
    number = ctypes.c_int()
    if error := ctypes.CDLL(library[1]).ncclGetVersion(ctypes.byref(number)):
        raise RuntimeError(f"{library[1]}: ncclGetVersion returns the error {error}")
    return decoded_version(number.value)


def decoded_version(number: int) -> tuple[int, ...]:
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
