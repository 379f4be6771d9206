"""Machines that the planner knows: this machine, ``cluster=auto``, and nodes of a known GPU, ``cluster=h100``."""

import math
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gpt4d.config.schema import ClusterConfig, LevelConfig
from gpt4d.runtime.errors import ConfigError
from gpt4d.runtime.machine import MachineFacts, read_facts

if TYPE_CHECKING:
    import torch


class GpuModel(NamedTuple):
    """Rates of a GPU and its usual nodes. Vendors state memory, peak and nodes; all other rates are estimates."""

    memory_gib: float  # as torch reports it, which is less than the vendor's number
    peak_tflops: float | None  # dense bf16
    matmul_tflops: float  # reached by a large product
    attention_tflops: float | None  # in causal attention without masked products; None: unknown
    memory_gb_s: float
    link_gb_s: float  # to other GPUs of its node, in each direction
    network_gb_s: float  # a GPU's share of its node's links to other nodes
    fp8_tflops: float | None = None  # reached by a large float8 product; None: the GPU has none that gpt4d supports
    gpus: int = 8  # devices of a node
    nodes: int = 1  # nodes whose GPUs are connected like the GPUs of one node: a rack with NVLink switches has 18
    pair_gb_s: float | None = None  # to one other GPU of the node, in each direction; None: as to all of them


# Keys are words of torch's device names. The first matching key counts.
_GPUS = {
    "GB300": GpuModel(276, 2500, 1650, None, 6000, 900, 50, 2900, gpus=4, nodes=18),
    "B300": GpuModel(267, 2250, 1500, None, 6000, 900, 100, 2600),
    "GB200": GpuModel(184, 2500, 1650, None, 6000, 900, 50, 2900, gpus=4, nodes=18),
    "B200": GpuModel(178, 2250, 1500, None, 6000, 900, 50, 2600),
    "GH200": GpuModel(94.5, 989, 650, 400, 3200, 100, 25, 1150, gpus=4),
    "H200 NVL": GpuModel(139.5, 835, 550, 330, 4000, 50, 25, 950),
    "H200": GpuModel(139.5, 989, 680, 400, 4000, 450, 50, 1200),
    "H100 NVL": GpuModel(93, 835, 500, 330, 3200, 50, 25, 880),
    "H100 PCIe": GpuModel(79, 756, 450, 260, 1700, 50, 25, 780),
    "H100": GpuModel(79, 989, 650, 400, 2800, 450, 50, 1150),
    "H800": GpuModel(79, 989, 650, 400, 2800, 200, 50, 1150),
    "H20": GpuModel(95, 148, 130, None, 3400, 450, 50, 250),
    "A100 80GB PCIe": GpuModel(79, 312, 220, 140, 1600, 25, 12.5),
    "A100-PCIE": GpuModel(39.4, 312, 220, 140, 1300, 25, 12.5),
    "A100-SXM4-40GB": GpuModel(39.4, 312, 240, 150, 1300, 300, 25),
    "A100": GpuModel(79, 312, 240, 150, 1700, 300, 25),
    "A800": GpuModel(79, 312, 240, 150, 1700, 200, 25),
    "L40S": GpuModel(44.4, 362, 200, None, 700, 25, 12.5, 380),
    "RTX 6000 Ada": GpuModel(47.4, 364, 200, None, 800, 25, 12.5, 380),
    "RTX A6000": GpuModel(47.4, 155, 100, None, 650, 25, 12.5),
    "RTX 5090": GpuModel(31.3, 209, 170, None, 1500, 25, 1.25, 320),
    "RTX 4090": GpuModel(23.5, 165, 140, None, 850, 20, 1.25, 260),
    "RTX 3090": GpuModel(23.5, 71, 60, None, 800, 20, 1.25),
    "MI355X": GpuModel(287, 2500, 1200, None, 6000, 450, 50, pair_gb_s=65),
    "MI350X": GpuModel(287, 2300, 1100, None, 6000, 450, 50, pair_gb_s=65),
    "MI325X": GpuModel(255, 1307, 600, None, 4300, 300, 50, pair_gb_s=45),
    "MI300X": GpuModel(191, 1307, 600, None, 3500, 300, 50, pair_gb_s=45),
    "MI300A": GpuModel(127, 981, 450, None, 3500, 100, 25, gpus=4),
    "MI250X": GpuModel(63.9, 191.5, 110, None, 1200, 150, 12.5, pair_gb_s=50),
    "MI250": GpuModel(63.9, 181, 105, None, 1200, 150, 12.5, pair_gb_s=50),
    "MI210": GpuModel(63.9, 181, 105, None, 1200, 50, 12.5),
}
_UNKNOWN_GPU = GpuModel(0, None, 50, None, 500, 20, 1.25)
_MEASURED = {"H200": "estimates; planned steps of one H200 were within 1 % of measured steps"}
# Estimated TFLOP/s in fp32 of a core, by its widest vectors in /proc/cpuinfo, and GB/s of its elementwise operations.
_CORE_TFLOPS = {"avx512f": 0.1, "avx2": 0.05}
_OTHER_CORE_TFLOPS = 0.03
_CORE_GB_S = 10.0
_RESERVED_GIB = 1.0  # context of CUDA, cuBLAS, cuDNN
# On 4 A100 with NVLink, NCCL took 544 MB per group of two, and 688 MB per larger group (NVIDIA/nccl issue 964).
COMMUNICATOR_GIB = 0.65


def gpu_model(name: str) -> GpuModel | None:
    """Return the rates of the GPU that torch calls ``name``; None for a part of a GPU (MIG) and for unknown GPUs."""
    key = _known_gpu(name)
    return _GPUS[key] if key else None


def peak_flops(device: "torch.device") -> float | None:
    """Return the dense bf16 peak of ``device`` in FLOP/s, or None if it is unknown."""
    import torch

    model = gpu_model(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return model.peak_tflops * 1e12 if model and model.peak_tflops else None


def _known_gpu(name: str) -> str | None:
    found = (words for words in _GPUS if re.search(rf"\b{words}\b", name))
    return None if " MIG " in name else next(found, None)


def gpu_clusters() -> dict[str, ClusterConfig]:
    """Return a machine with any number of nodes of each known GPU, by names such as ``h100_pcie`` and ``rtx4090``."""
    facts = {key: MachineFacts(0, gpu=key, gpu_gib=gpu.memory_gib, gpus=gpu.gpus) for key, gpu in _GPUS.items()}
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
    model = _GPUS[known] if known else _UNKNOWN_GPU
    local = facts.gpus if facts.local_ranks is None else facts.local_ranks
    levels = [LevelConfig(local, model.link_gb_s, model.pair_gb_s, latency_us=5)]
    if model.nodes > 1:
        levels.insert(0, LevelConfig(model.nodes, model.link_gb_s * local, latency_us=5))
    between = LevelConfig(None, model.network_gb_s * local * model.nodes, latency_us=10)
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
