"""Facts about the machine on which this process runs: memory, cores, GPUs, and the tasks of its launcher."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt4d.runtime.launchers import innermost, number, tasks_on_node

_UNLIMITED_BYTES = 2**60  # a larger limit means that the control group is not limited
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
AMD_DRIVER = "/dev/kfd"  # exists where AMD's driver is loaded
_GPU_DRIVERS = "/dev/nvidiactl", AMD_DRIVER
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
VECTORS = ("avx512f", "avx2")  # names in /proc/cpuinfo, widest first


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine that a process can read without a measurement."""

    host_gib: float  # memory of the node, or of the control group of its processes
    local_ranks: int | None = None  # tasks on each node; None: no launcher has started this process
    nodes: int = 1
    gpu: str | None = None  # torch's name of the GPU
    gpu_gib: float = 0.0
    gpus: int = 0  # on the node, as far as this process sees them
    cores: int = 1  # cores of the node
    vectors: str | None = None  # a name in /proc/cpuinfo


def read_facts(environment: Mapping[str, str] = os.environ) -> MachineFacts:
    """Return the facts about this machine. Imports torch only where a driver of a GPU is loaded."""
    local_ranks, nodes = ranks_and_nodes(environment)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *control_group_limits()]
    facts = MachineFacts(min(limits) / 2**30, local_ranks, nodes, **read_cpu())
    if any(map(os.path.exists, _GPU_DRIVERS)) and "" not in map(environment.get, _VISIBLE_GPUS):
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(0)
            gpu_gib, gpus = device.total_memory / 2**30, torch.cuda.device_count()
            return replace(facts, gpu=device.name, gpu_gib=gpu_gib, gpus=gpus)
    return facts


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the physical cores of the node and their widest vectors, as fields of MachineFacts."""
    text = path.read_text() if path.exists() else ""
    counts = {key: int(n) for key, n in re.findall(r"^(siblings|cpu cores)\s*: (\d+)$", text, re.MULTILINE)}
    threads = counts.get("siblings", 1) // counts.get("cpu cores", 1) or 1  # threads of a core
    flags = set((re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE) or [""])[0].split())
    return {
        "cores": max(1, (os.cpu_count() or 1) // threads),
        "vectors": next((name for name in VECTORS if name in flags), None),
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use, hardware threads included."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def ranks_and_nodes(environment: Mapping[str, str]) -> tuple[int | None, int]:
    """Return tasks per node (None without a launcher) and nodes, from the variables of the launcher or of a Slurm job.

    If the nodes of a Slurm job have different numbers of tasks, the first node's number is returned.
    """
    launcher = innermost(environment)
    if launcher and launcher.program != "srun":
        local = launcher.local_world_size(environment)
        return local, -(-launcher.world_size(environment) // local)
    for prefix in ("SLURM_STEP_", "SLURM_"):
        if tasks := environment.get(f"{prefix}TASKS_PER_NODE"):  # 4(x2),3 means 4, 4, 3
            own = f"{prefix}NUM_NODES"
            nodes = number(environment, own if environment.get(own) else "SLURM_JOB_NUM_NODES", 1, at_least=1)
            return tasks_on_node(tasks, 0, f"{prefix}TASKS_PER_NODE"), nodes
    return None, 1


def control_group_limits(root: Path = _CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the memory limits in bytes of this process's control groups (version 1 or 2) and of their ancestors."""
    if sys.platform != "linux" or not own.exists():
        return []
    limits = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            file = directory / name
            if directory.is_relative_to(base) and file.is_file() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
    return [limit for limit in limits if limit < _UNLIMITED_BYTES]
