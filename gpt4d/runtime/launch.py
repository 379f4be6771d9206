"""Who am I: rank, world and device from torchrun's or Slurm's variables; and how a rank tells why it ends."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt4d.config import NodeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process. Made without torch, so that mistakes are answered at once."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master: str | None = None  # host:port where rank 0 listens; None for a world of one

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """torchrun's variables first, then those of a Slurm step (``srun``); without either, a world of one."""
        e = environment
        if "WORLD_SIZE" in e and "RANK" in e:
            world_size, local = int(e["WORLD_SIZE"]), int(e.get("LOCAL_RANK", 0))
            master = f"{e.get('MASTER_ADDR', 'localhost')}:{e.get('MASTER_PORT', '29500')}"
            return cls(int(e["RANK"]), world_size, local, int(e.get("LOCAL_WORLD_SIZE", 1)), master)
        # SLURM_NTASKS alone is also set in the batch script itself, where no srun has started tasks.
        if int(e.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            world_size = int(e["SLURM_STEP_NUM_TASKS"])
            host = e.get("MASTER_ADDR") or first_host(e["SLURM_STEP_NODELIST"])
            # Jobs that share a node must not meet on one port: their ids differ. The kernel's own ports are higher.
            port = e.get("MASTER_PORT") or 20000 + (int(e["SLURM_JOB_ID"]) * 64 + int(e["SLURM_STEP_ID"])) % 12000
            local_world_size = tasks_on_node(e["SLURM_STEP_TASKS_PER_NODE"], int(e["SLURM_NODEID"]))
            return cls(int(e["SLURM_PROCID"]), world_size, int(e["SLURM_LOCALID"]), local_world_size, f"{host}:{port}")
        return cls()


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: ``nid[001-004,7],login1`` → ``nid001``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return match[1] + (match[2] or "") + match[3]


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Slurm's ``4(x2),3`` is 4, 4, 3: the tasks of the ``node``-th."""
    counts = []
    for entry in tasks_per_node.split(","):
        tasks, _, times = entry.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[node]


def device_of(launch: Launch) -> "torch.device":
    """This rank's device. NodeError if the node has fewer GPUs than tasks."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1:  # of its own, as Slurm's --gpus-per-task gives; that it is, the ranks compare
        return torch.device("cuda", 0)
    if launch.local_world_size > torch.cuda.device_count():
        raise NodeError(
            f"node {socket.gethostname()} has {torch.cuda.device_count()} GPU(s) and {launch.local_world_size} tasks: "
            "start one task a GPU (torchrun --nproc-per-node, or Slurm's --ntasks-per-node)"
        )
    return torch.device("cuda", launch.local_rank)


def tell_error(words: str) -> None:
    """One line, on the console and, where torchrun asks for it, for the end of its own words."""
    print(f"error: {words}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(report).write_text(json.dumps({"message": f"error: {words}", "timestamp": int(time.time())}))
