"""Check of the description of a machine."""

import re
from typing import Any

from gpt4d.config.schema import ClusterConfig, ConfigError
from gpt4d.config.values import LARGEST, check_above_0, check_at_least, check_choice, check_fraction, check_share


def check_cluster(cluster: ClusterConfig) -> None:
    """Check the description of a machine. Raises ConfigError for an invalid value."""
    check_choice("cluster.device", cluster.device, ("cpu", "cuda"))
    for key in ("memory_gib", "host_gib", "matmul_tflops", "memory_gb_s"):
        check_above_0(f"cluster.{key}", getattr(cluster, key))
    if cluster.memory_gib is None and cluster.host_gib is None:
        raise ConfigError("cluster.memory_gib=null: the memory of a device is unknown; set it, or cluster.host_gib")
    for key in ("reserved_gib", "peak_tflops", "operation_us", "skew_us"):
        check_at_least(f"cluster.{key}", getattr(cluster, key), 0)
    check_share("cluster.hidden", cluster.hidden)
    check_fraction("cluster.margin", cluster.margin)
    if not cluster.levels:
        raise ConfigError("cluster.levels=[]: a machine needs a level of links; use [{group_gb_s: 1}], for example")
    for number, level in enumerate(cluster.levels):
        name = f"cluster.levels[{number}]"
        if level.ranks is None and number:
            raise ConfigError(f"{name}.ranks=null: only the outermost level may be open; set the number of its members")
        check_at_least(f"{name}.ranks", level.ranks, 1)
        check_above_0(f"{name}.group_gb_s", level.group_gb_s)
        check_above_0(f"{name}.pair_gb_s", level.pair_gb_s)
        check_at_least(f"{name}.latency_us", level.latency_us, 0)
    for number, entry in enumerate(cluster.measured):
        name = f"cluster.measured[{number}]"
        check_choice(f"{name}.kind", entry.kind, ("all_reduce", "all_gather", "reduce_scatter"))
        for key in ("local", "nodes", "sharing"):
            check_at_least(f"{name}.{key}", getattr(entry, key), 1)
        check_at_least(f"{name}.local·nodes", entry.local * entry.nodes, 2)
        check_above_0(f"{name}.gb_s", entry.gb_s)
        check_at_least(f"{name}.latency_us", entry.latency_us, 0)
        check_share(f"{name}.hidden", entry.hidden)
    if cluster.atp_gb_s is not None and not _are_bandwidths(cluster.atp_gb_s):
        raise ConfigError(
            f"cluster.atp_gb_s={cluster.atp_gb_s}: not a map of meshes to two bandwidths; use values above 0, and null "
            "for a dimension of one device: {2x4: [1.2, 4.95], 8x1: [0.97, null]}"
        )


def _are_bandwidths(bandwidths: Any) -> bool:
    if not isinstance(bandwidths, dict):
        return False
    for mesh, pair in bandwidths.items():
        dims = re.fullmatch(r"(\d+)x(\d+)", str(mesh))
        if not dims or not isinstance(pair, list) or len(pair) != 2:
            return False
        for size, bandwidth in zip(map(int, dims.groups()), pair, strict=True):
            if (bandwidth is None) != (size == 1) or (bandwidth is not None and not 0 < bandwidth <= LARGEST):
                return False
    return True
