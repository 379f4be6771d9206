"""This process in the job: rank, world size and device, from the launcher's variables; printing of errors."""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt4d.runtime.errors import ConfigError, NodeError
from gpt4d.runtime.files import open_regular
from gpt4d.runtime.launchers import innermost, number

if TYPE_CHECKING:
    import torch


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
        """Read the variables of the innermost launcher; without a launcher, return a world of one rank.

        Raises ConfigError if a variable is missing or has no value that a launcher sets.
        """
        launcher, sweep_job = innermost(environment), number(environment, SWEEP_JOB, 0)
        world_size = launcher.world_size(environment) if launcher else 1
        if launcher is None or world_size == 1:
            return cls(sweep_job=sweep_job)
        return cls(
            rank=number(environment, launcher.rank),
            world_size=world_size,
            local_rank=number(environment, launcher.local_rank, 0),
            local_world_size=launcher.local_world_size(environment),
            master=launcher.address(environment),
            sweep_job=sweep_job,
            start=launcher.start(environment),
        )

    @classmethod
    def for_errors(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """Return only the ranks and the job of a sweep; 0 for a variable that is missing or wrong."""

        def known(name: str) -> int:
            with suppress(ConfigError):
                return number(environment, name, 0)
            return 0

        launcher, sweep_job = innermost(environment), known(SWEEP_JOB)
        if launcher is None:
            return cls(sweep_job=sweep_job)
        return cls(known(launcher.rank), local_rank=known(launcher.local_rank), sweep_job=sweep_job)


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
        task, first, last = (number(environment, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX"))
        count = number(environment, "SLURM_ARRAY_TASK_COUNT", at_least=1)
        if last - first + 1 != count:
            raise ConfigError(
                f"--array: {count} task ids from {first} to {last} have gaps; use --array=0-{count - 1}, whose tasks "
                "share all unfinished jobs of the sweep"
            )
        return cls(task, task - first, count)

    def takes(self, job: int) -> bool:
        """Return whether this task trains job number ``job`` (from 0) of a sweep."""
        return job % self.count == self.index


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
            "start one task per GPU (torchrun --nproc-per-node, Slurm's --ntasks-per-node, mpiexec --ppn)"
        )
    return torch.device("cuda", launch.local_rank)


def print_error(message: str) -> None:
    """Print one line to stderr. Under torchrun, also write it to the file that torchrun reports at the end."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # A full disk must not hide the error, nor a FIFO delay it.
        with suppress(OSError), open(report, "w", opener=open_regular) as file:
            json.dump({"message": f"error: {message}", "timestamp": int(time.time())}, file)
