"""The launcher environment: rank, world size and device from torchrun's or Slurm's variables; printing of errors."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpt4d.config import ConfigError, NodeError

if TYPE_CHECKING:
    import torch


_RESTART_PORTS = 4999  # distance between the ports of a Slurm job's starts; not a multiple of the jobs' distance, 64
SWEEP_JOB = "GPT4D_SWEEP_JOB"  # number of a job in the order in which a sweep starts jobs, from 1


@dataclass(frozen=True)
class Launch:
    """This process's rank in the job, as set by its launcher. Needs no torch, so that errors appear without delay."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master: str | None = None  # host:port where rank 0 listens; None if world_size is 1
    sweep_job: int = 0  # the number of this job in a sweep; 0 outside a sweep
    start: str = ""  # the launcher's name of this start of the job, equal on all ranks; "" if it has no name

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """Read the variables of torchrun or of a Slurm step (``srun``); without either, return a world of one rank."""
        launch, number = cls._from_launcher(environment), int(environment.get(SWEEP_JOB, 0))
        return replace(launch, sweep_job=number)

    @classmethod
    def _from_launcher(cls, env: Mapping[str, str]) -> "Launch":
        if "WORLD_SIZE" in env and "RANK" in env:
            world_size, local = int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
            master = f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', '29500')}"
            run = env.get("TORCHELASTIC_RUN_ID")
            start = f"{run}.{env.get('TORCHELASTIC_RESTART_COUNT', 0)}" if run else ""
            local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
            return cls(int(env["RANK"]), world_size, local, local_world_size, master, start=start)
        # Not SLURM_NTASKS: it is also set in the batch script itself, where srun has not started any tasks.
        if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            world_size = int(env["SLURM_STEP_NUM_TASKS"])
            host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
            job, step, restart = (int(env.get(f"SLURM_{name}") or 0) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
            # Jobs that share a node need different ports, so the port is derived from the job and step ids. A restart
            # needs another port if the first one was taken. All ports are below the kernel's ephemeral ports.
            port = env.get("MASTER_PORT") or 20000 + (job * 64 + step + _RESTART_PORTS * restart) % 12000
            local_world_size = tasks_on_node(env["SLURM_STEP_TASKS_PER_NODE"], int(env["SLURM_NODEID"]))
            rank, local = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
            start = f"{job}.{step}.{restart}"
            return cls(rank, world_size, local, local_world_size, f"{host}:{port}", start=start)
        return cls()


@dataclass(frozen=True)
class ArrayTask:
    """This process's task in a Slurm job array (``sbatch --array``), whose tasks share the jobs of a sweep."""

    number: int  # the task id that Slurm shows
    index: int  # position among the tasks, from 0
    count: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ArrayTask | None":
        """Return the task; None outside an array. Raises ConfigError unless the array's task ids are consecutive."""
        if "SLURM_ARRAY_TASK_ID" not in environment:
            return None
        names = ("ID", "MIN", "MAX", "COUNT")
        number, first, last, count = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in names)
        if last - first + 1 != count:
            raise ConfigError(
                f"--array: {count} task ids from {first} to {last} have gaps; use --array=0-{count - 1}, whose tasks "
                "share all unfinished jobs of the sweep"
            )
        return cls(number, number - first, count)

    def takes(self, job: int) -> bool:
        """Return whether this task trains job number ``job`` (from 0) of a sweep."""
        return job % self.count == self.index


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list: ``nid[001-004,7],login1`` → ``nid001``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    assert match, nodes
    return match[1] + (match[2] or "") + match[3]


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on node ``node`` (from 0) of Slurm's compressed list: ``4(x2),3`` means 4, 4, 3."""
    counts = []
    for entry in tasks_per_node.split(","):
        tasks, _, times = entry.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[node]


def select_device(launch: Launch) -> "torch.device":
    """Return this rank's GPU, or the CPU without GPUs. Raises NodeError if the node has fewer GPUs than tasks."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1:  # Slurm's --gpus-per-task shows only this task's GPU; preflight checks it
        return torch.device("cuda", 0)
    if launch.local_world_size > torch.cuda.device_count():
        raise NodeError(
            f"node {socket.gethostname()} has {torch.cuda.device_count()} GPU(s) for {launch.local_world_size} tasks; "
            "start one task per GPU (torchrun --nproc-per-node, or Slurm's --ntasks-per-node)"
        )
    return torch.device("cuda", launch.local_rank)


def print_error(message: str) -> None:
    """Print one line to stderr. Under torchrun, also write it to the file that torchrun reports at the end."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # a full disk must not hide the error
            Path(report).write_text(json.dumps({"message": f"error: {message}", "timestamp": int(time.time())}))
