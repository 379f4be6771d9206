"""Check of a machine's settings."""

import re
from typing import Any

from gpt4d.config.fields import LARGEST
from gpt4d.config.schema import ClusterConfig
from gpt4d.config.values import check_at_least
from gpt4d.runtime.errors import ConfigError


def check_precision(precision: str, cluster: ClusterConfig) -> None:
    """Raise ConfigError if ``train.precision`` needs products that the GPUs of a machine do not have."""
    if precision == "fp8" and cluster.device == "cuda" and cluster.fp8_tflops is None:
        raise ConfigError(
            f"train.precision=fp8: {cluster.name} has no float8 products (cluster.fp8_tflops=null); use "
            "train.precision=bf16, or set the rate of NVIDIA GPUs of compute capability 8.9 or higher"
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Check relations between the settings of a machine. Raises ConfigError for an impossible combination."""
    if cluster.memory_gib is None and cluster.host_gib is None:
        raise ConfigError("cluster.memory_gib=null: the memory of a device is unknown; set it, or cluster.host_gib")
    if not cluster.levels:
        raise ConfigError("cluster.levels=[]: a machine needs a level of links; use [{group_gb_s: 1}], for example")
    for number, level in enumerate(cluster.levels):
        if level.ranks is None and number:
            raise ConfigError(
                f"cluster.levels[{number}].ranks=null: only the outermost level may be open; set the number of its "
                "members"
            )
    for number, entry in enumerate(cluster.measured):
        check_at_least(f"cluster.measured[{number}].local·nodes", entry.local * entry.nodes, 2)
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
