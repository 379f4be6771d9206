"""The command that starts a run on a plan: sbatch, srun, torchrun, python or gpt4d, with overrides."""

import shlex
from collections.abc import Sequence

from gpt4d.config import CONFIG_DIR, ClusterConfig, Config, divisors
from gpt4d.model import registry
from gpt4d.planner.topology import node_size

_CLONE = CONFIG_DIR.parent  # clone of the repository; an installed package has no train.py and no scripts
_SMALL = 20_000_000  # parameters of a model for which the default corpus may be meant
_ACCOUNT = "--account=ACCOUNT"  # many Slurm clusters refuse a job without an account


def command(config: Config, devices: int, arguments: Sequence[str], chosen: Sequence[str]) -> str:
    """Return the command line that trains on ``devices`` devices, to paste into a shell in the clone.

    ACCOUNT stands for an account of Slurm. PATH stands for the data of a large model, unless ``arguments`` choose data.

    Args:
        config: the configuration, with the machine.
        devices: the number of devices.
        arguments: the user's overrides.
        chosen: the planner's overrides, which replace the user's overrides of the same keys.
    """
    cluster, words = config.cluster, merged([*arguments, *_data(config, arguments)], chosen)
    host = cluster.levels[-1].ranks if len(cluster.levels) > 1 else node_size(cluster)
    per_node = max(size for size in divisors(devices) if size <= (host or devices))
    nodes, in_clone = devices // per_node, (_CLONE / "train.py").exists()
    slurm = f"{_ACCOUNT} --nodes={nodes} "
    if (_CLONE / "scripts" / "slurm" / f"{cluster.name}.sh").exists():
        words = [word for word in words if word != f"cluster={cluster.name}"]  # the script adds it
        tasks = "" if per_node == host else _tasks(cluster, per_node)
        start = f"sbatch {slurm}{tasks}scripts/slurm/{cluster.name}.sh"
    elif nodes > 1:
        slurm += _tasks(cluster, per_node)
        start = f"sbatch {slurm}scripts/slurm/generic.sh" if in_clone else f"srun {slurm}gpt4d train"
    elif devices > 1:
        start = f"torchrun --nproc-per-node {devices} {'train.py' if in_clone else '-m gpt4d train'}"
    else:
        start = "python train.py" if in_clone else "gpt4d train"
    return " ".join([start, *map(shlex.quote, words)])


def merged(arguments: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the user's overrides, where the planner's overrides replace overrides of the same keys."""
    keys = {override.partition("=")[0] for override in chosen} | {"parallel.mode"}
    return [*(word for word in arguments if word.partition("=")[0] not in keys), *chosen]


def _data(config: Config, arguments: Sequence[str]) -> list[str]:
    """Return placeholders for the data of a large model. The default data are a few megabytes."""
    if any(word.startswith(("data=", "data.")) for word in arguments):
        return []
    description, unit = registry.describe(config.model), registry.of(config.model).unit
    source = "tokens" if unit == "tokens" else "pictures"
    return [f"data={source}", "data.path=PATH"] if description.num_parameters > _SMALL else []


def _tasks(cluster: ClusterConfig, per_node: int) -> str:
    gpus = f"--gpus-per-node={per_node} " if cluster.device == "cuda" else ""
    return f"--ntasks-per-node={per_node} {gpus}"
