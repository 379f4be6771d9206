"""The command that starts a run on a plan: ``sbatch``, ``torchrun`` or ``python``, with overrides."""

import shlex
from collections.abc import Sequence

from gpt4d.config import CONFIG_DIR, ClusterConfig
from gpt4d.planner.topology import node_size


def command(cluster: ClusterConfig, devices: int, arguments: Sequence[str], chosen: Sequence[str]) -> str:
    """Return the command line that trains on ``devices`` devices, to paste into a shell in the clone.

    Args:
        cluster: the machine.
        devices: the number of devices.
        arguments: the user's overrides.
        chosen: the planner's overrides, which replace the user's overrides of the same keys.
    """
    words = merged(arguments, chosen)
    per_node = min(devices, node_size(cluster))
    nodes = -(-devices // per_node)
    start = f"torchrun --nproc-per-node {devices} train.py" if devices > 1 else "python train.py"
    if (CONFIG_DIR.parent / "scripts" / "slurm" / f"{cluster.name}.sh").exists():
        words = [word for word in words if word != f"cluster={cluster.name}"]  # the script adds it
        whole = per_node == node_size(cluster)
        start = f"sbatch --nodes={nodes} {'' if whole else _tasks(cluster, per_node)}scripts/slurm/{cluster.name}.sh"
    elif nodes > 1:
        start = f"sbatch --nodes={nodes} {_tasks(cluster, per_node)}scripts/slurm/generic.sh"
    return " ".join([start, *map(shlex.quote, words)])


def merged(arguments: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the user's overrides, and the planner's overrides in place of those of the same keys."""
    keys = {override.partition("=")[0] for override in chosen} | {"parallel.mode"}
    return [*(word for word in arguments if word.partition("=")[0] not in keys), *chosen]


def _tasks(cluster: ClusterConfig, per_node: int) -> str:
    gpus = f"--gpus-per-node={per_node} " if cluster.device == "cuda" else ""
    return f"--ntasks-per-node={per_node} {gpus}"
