"""Time of work on a device, and the memory, contexts and communicators that processes use on GPUs."""

import csv
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

_COMMUNICATOR = re.compile(r"comm 0x[0-9a-f]+ rank \d+ nranks (\d+) .*Init COMPLETE")
_QUERY = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]


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
