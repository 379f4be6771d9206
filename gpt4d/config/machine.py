"""Machines that the planner knows: this machine, ``cluster=auto``, and nodes of a known GPU, ``cluster=h100``."""

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpt4d.config.fields import ConfigError
from gpt4d.config.launchers import innermost, number, tasks_on_node
from gpt4d.config.schema import ClusterConfig, LevelConfig

_UNLIMITED_BYTES = 2**60  # a larger limit means that the control group is not limited
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
AMD_DRIVER = "/dev/kfd"  # exists where AMD's driver is loaded
_GPU_DRIVERS = "/dev/nvidiactl", AMD_DRIVER
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


class GpuModel(NamedTuple):
    """Rates of a GPU. The vendor states the peak; all other rates are estimates."""

    peak_tflops: float | None  # dense bf16
    matmul_tflops: float  # reached by a large product
    attention_tflops: float | None  # in causal attention without masked products; None: unknown
    memory_gb_s: float
    link_gb_s: float  # to other GPUs of its node, in each direction
    network_gb_s: float  # a GPU's share of its node's links to other nodes
    fp8_tflops: float | None = None  # reached by a large float8 product; None: the GPU has none that gpt4d supports


# Keys are words of torch's device names. The first matching key counts.
_GPUS = {
    "GB300": GpuModel(2500, 1650, None, 6000, 900, 50, 2900),
    "B300": GpuModel(2250, 1500, None, 6000, 900, 100, 2600),
    "GB200": GpuModel(2500, 1650, None, 6000, 900, 50, 2900),
    "B200": GpuModel(2250, 1500, None, 6000, 900, 50, 2600),
    "GH200": GpuModel(989, 650, 400, 3200, 100, 25, 1150),
    "H200 NVL": GpuModel(835, 550, 330, 4000, 50, 25, 950),
    "H200": GpuModel(989, 680, 400, 4000, 450, 50, 1200),
    "H100 NVL": GpuModel(835, 500, 330, 3200, 50, 25, 880),
    "H100 PCIe": GpuModel(756, 450, 260, 1700, 50, 25, 780),
    "H100": GpuModel(989, 650, 400, 2800, 450, 50, 1150),
    "H800": GpuModel(989, 650, 400, 2800, 200, 50, 1150),
    "H20": GpuModel(148, 130, None, 3400, 450, 50, 250),
    "A100 80GB PCIe": GpuModel(312, 220, 140, 1600, 25, 12.5),
    "A100-PCIE": GpuModel(312, 220, 140, 1300, 25, 12.5),
    "A100-SXM4-40GB": GpuModel(312, 240, 150, 1300, 300, 25),
    "A100": GpuModel(312, 240, 150, 1700, 300, 25),
    "A800": GpuModel(312, 240, 150, 1700, 200, 25),
    "L40S": GpuModel(362, 200, None, 700, 25, 12.5, 380),
    "RTX 6000 Ada": GpuModel(364, 200, None, 800, 25, 12.5, 380),
    "RTX A6000": GpuModel(155, 100, None, 650, 25, 12.5),
    "RTX 5090": GpuModel(209, 170, None, 1500, 25, 1.25, 320),
    "RTX 4090": GpuModel(165, 140, None, 850, 20, 1.25, 260),
    "RTX 3090": GpuModel(71, 60, None, 800, 20, 1.25),
    "MI355X": GpuModel(2500, 1200, None, 6000, 450, 50),
    "MI350X": GpuModel(2300, 1100, None, 6000, 450, 50),
    "MI325X": GpuModel(1307, 600, None, 4300, 300, 50),
    "MI300X": GpuModel(1307, 600, None, 3500, 300, 50),
    "MI300A": GpuModel(981, 450, None, 3500, 100, 25),
    "MI250X": GpuModel(191.5, 110, None, 1200, 150, 12.5),
    "MI250": GpuModel(181, 105, None, 1200, 150, 12.5),
    "MI210": GpuModel(181, 105, None, 1200, 50, 12.5),
}


class GpuNode(NamedTuple):
    """Memory of a GPU and the nodes that are sold with it, from the vendors' data sheets."""

    memory_gib: float  # as torch reports it, which is less than the vendor's number
    gpus: int = 8  # devices of a node
    nodes: int = 1  # nodes whose GPUs are connected like the GPUs of one node: a rack with NVLink switches has 18
    pair_gb_s: float | None = None  # to one other GPU of the node, in each direction; None: as to all of them


_NODES = {
    "GB300": GpuNode(276, 4, 18),
    "B300": GpuNode(267),
    "GB200": GpuNode(184, 4, 18),
    "B200": GpuNode(178),
    "GH200": GpuNode(94.5, 4),
    "H200 NVL": GpuNode(139.5),
    "H200": GpuNode(139.5),
    "H100 NVL": GpuNode(93),
    "H100 PCIe": GpuNode(79),
    "H100": GpuNode(79),
    "H800": GpuNode(79),
    "H20": GpuNode(95),
    "A100 80GB PCIe": GpuNode(79),
    "A100-PCIE": GpuNode(39.4),
    "A100-SXM4-40GB": GpuNode(39.4),
    "A100": GpuNode(79),
    "A800": GpuNode(79),
    "L40S": GpuNode(44.4),
    "RTX 6000 Ada": GpuNode(47.4),
    "RTX A6000": GpuNode(47.4),
    "RTX 5090": GpuNode(31.3),
    "RTX 4090": GpuNode(23.5),
    "RTX 3090": GpuNode(23.5),
    "MI355X": GpuNode(287, pair_gb_s=65),
    "MI350X": GpuNode(287, pair_gb_s=65),
    "MI325X": GpuNode(255, pair_gb_s=45),
    "MI300X": GpuNode(191, pair_gb_s=45),
    "MI300A": GpuNode(127, 4),
    "MI250X": GpuNode(63.9, pair_gb_s=50),
    "MI250": GpuNode(63.9, pair_gb_s=50),
    "MI210": GpuNode(63.9),
}
_UNKNOWN_GPU = GpuModel(None, 50, None, 500, 20, 1.25)
_MEASURED = {"H200": "estimates; planned steps of one H200 were within 1 % of measured steps"}
# Estimated TFLOP/s in fp32 of a core, by its widest vectors in /proc/cpuinfo, and GB/s of its elementwise operations.
_CORE_TFLOPS = {"avx512f": 0.1, "avx2": 0.05}
_OTHER_CORE_TFLOPS = 0.03
_CORE_GB_S = 10.0
_RESERVED_GIB = 1.0  # context of CUDA, cuBLAS, cuDNN
# On 4 A100 with NVLink, NCCL took 544 MB per group of two, and 688 MB per larger group (NVIDIA/nccl issue 964).
COMMUNICATOR_GIB = 0.65


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
    vectors: str | None = None  # key of _CORE_TFLOPS


def gpu_model(name: str) -> GpuModel | None:
    """Return the rates of the GPU that torch calls ``name``; None for a part of a GPU (MIG) and for unknown GPUs."""
    key = _known_gpu(name)
    return _GPUS[key] if key else None


def _known_gpu(name: str) -> str | None:
    found = (words for words in _GPUS if re.search(rf"\b{words}\b", name))
    return None if " MIG " in name else next(found, None)


def gpu_clusters() -> dict[str, ClusterConfig]:
    """Return a machine with any number of nodes of each known GPU, by names such as ``h100_pcie`` and ``rtx4090``."""
    facts = {key: MachineFacts(0, gpu=key, gpu_gib=node.memory_gib, gpus=node.gpus) for key, node in _NODES.items()}
    names = {key: re.sub(r"[ -]", "_", key.lower()).replace("rtx_", "rtx") for key in facts}
    return {name: replace(describe(facts[key]), name=name) for key, name in names.items()}


def sized(cluster: ClusterConfig) -> ClusterConfig:
    """Return the machine with ``cluster.nodes`` nodes of ``cluster.devices_per_node`` devices, if they are set.

    A device keeps its share of the links of its node to other nodes. Raises ConfigError for a machine without nodes.
    """
    nodes, devices = cluster.nodes, cluster.devices_per_node
    if nodes is None and devices is None:
        return cluster
    *outer, inner = cluster.levels
    if not outer or inner.ranks is None:
        key = f"cluster.nodes={nodes}" if nodes else f"cluster.devices_per_node={devices}"
        raise ConfigError(f"{key}: cluster.levels of {cluster.name} states no nodes; set it, or use cluster=h100")
    if devices:
        share = devices / inner.ranks
        outer = [replace(level, group_gb_s=level.group_gb_s * share) for level in outer]
        inner = replace(inner, ranks=devices)
    if nodes:
        for index in range(len(outer) - 1, 0, -1):
            connected = min(nodes, outer[index].ranks or nodes)
            if nodes % connected:
                raise ConfigError(
                    f"cluster.nodes={nodes}: {cluster.name} has groups of {connected} nodes; use a multiple"
                )
            outer[index], nodes = replace(outer[index], ranks=connected), nodes // connected
        outer[0] = replace(outer[0], ranks=nodes)
    return replace(cluster, levels=[*outer, inner])


def describe(facts: MachineFacts) -> ClusterConfig:
    """Return the planner's description of a machine with these facts.

    The processes of a node share the memory of a CPU machine, and each GPU has its own. Any number of such nodes may be
    planned for.
    """
    between = LevelConfig(latency_us=100)
    if facts.gpu is None:
        several = facts.nodes > 1 and facts.local_ranks
        return ClusterConfig(
            name="this machine's CPUs",
            device="cpu",
            memory_gib=None,
            host_gib=_two_digits(facts.host_gib),
            reserved_gib=0.4,
            rates=f"guesses from {facts.cores} core(s) with {facts.vectors or 'unknown'} vectors",
            matmul_tflops=round(facts.cores * _CORE_TFLOPS.get(facts.vectors or "", _OTHER_CORE_TFLOPS), 9),
            memory_gb_s=facts.cores * _CORE_GB_S,
            levels=[between, LevelConfig(facts.local_ranks, latency_us=100)] if several else [between],
        )
    known = _known_gpu(facts.gpu)
    model, node = (_GPUS[known], _NODES[known]) if known else (_UNKNOWN_GPU, GpuNode(facts.gpu_gib))
    local = facts.gpus if facts.local_ranks is None else facts.local_ranks
    levels = [LevelConfig(local, model.link_gb_s, node.pair_gb_s, latency_us=5)]
    if node.nodes > 1:
        levels.insert(0, LevelConfig(node.nodes, model.link_gb_s * local, latency_us=5))
    between = LevelConfig(None, model.network_gb_s * local * node.nodes, latency_us=10)
    return ClusterConfig(
        name=f"this machine's {facts.gpu}",
        device="cuda",
        memory_gib=math.floor(10 * facts.gpu_gib) / 10,
        reserved_gib=_RESERVED_GIB,
        rates=_MEASURED.get(known, "estimates") if known else "guesses: gpt4d does not know this GPU",
        communicator_gib=COMMUNICATOR_GIB,
        peak_tflops=model.peak_tflops,
        matmul_tflops=model.matmul_tflops,
        attention_tflops=model.attention_tflops,
        fp8_tflops=model.fp8_tflops,
        memory_gb_s=model.memory_gb_s,
        operation_us=4,
        skew_us=20,
        levels=[between, *levels],
    )


def _two_digits(value: float) -> float:
    """Round down to two digits: the memories of equal nodes differ by less."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.floor(value / unit + 1e-9) * unit, 9)


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
        "vectors": next((name for name in _CORE_TFLOPS if name in flags), None),
    }


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


@cache
def this_machine() -> ClusterConfig:
    """Return the description of the machine on which this process runs."""
    return describe(read_facts())


def register_resolver() -> None:
    """Let ``${machine:KEY}`` in YAML files stand for a value of this machine's description."""
    from omegaconf import OmegaConf

    def value(key: str) -> Any:
        return getattr(this_machine(), key)

    OmegaConf.register_new_resolver("machine", value, replace=True)
