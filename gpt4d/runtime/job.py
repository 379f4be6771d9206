"""The lifetime of a job: its ranks meet, form a process group, watch each other, and end together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gpt4d.runtime import compile_cache, gpu
from gpt4d.runtime.errors import ConfigError, NodeError
from gpt4d.runtime.launch import Launch, select_device
from gpt4d.runtime.rendezvous import Rendezvous
from gpt4d.runtime.watchdog import Watchdog

RAISED_ON_ALL_RANKS = ConfigError, SystemExit


@dataclass
class JobContext:
    """This rank's device and, if there are other ranks, its watchdog."""

    device: torch.device
    watchdog: Watchdog | None = None


@contextmanager
def process_group(
    launch: Launch,
    device: torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 120.0,
    deterministic: bool = False,
    run_dir: Path | None = None,
) -> Iterator[JobContext]:
    """Create the process group of all ranks of the job.

    An exception inside ends the job on every rank, with one line that names the rank, its host and the cause. Only a
    ConfigError or SystemExit, which all ranks raise together, passes through.

    Args:
        launch: this process's rank in the job and its launcher.
        device: the rank's device; None to select its GPU, or the CPU without GPUs.
        backend: backend of collectives; None for NCCL on GPUs and gloo on the host.
        timeout_s: time after which gpt4d's watchdog may end the job; torch's own watchdogs wait longer.
        deterministic: as in ``gpu.set_environment``.
        run_dir: the run's directory, which all ranks share, for the job's secret (``identity.job_key``) and NCCL's
            trace (``gpu.set_environment``); None for a job without a run directory.
    """
    gpu.set_environment(deterministic, run_dir)
    # macOS has no sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own_cores = gpu.share_cores(cores, launch.local_world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_cores)
    if launch.master is None:
        device = device or select_device(launch)
        with initialize(launch, dist.HashStore(), device, backend, timeout_s):
            yield JobContext(device)
        return
    rendezvous = Rendezvous(launch, timeout_s, run_dir)
    try:
        device = device or select_device(launch)
        rendezvous.wait_for_all_ranks()
        store = rendezvous.store.for_process_groups()
        with initialize(launch, store, device, backend, timeout_s, rendezvous.watchdog):
            yield JobContext(device, rendezvous.watchdog)
    except NodeError as error:  # raised on this node only, and ranks of all other nodes wait for this rank
        rendezvous.watchdog.fail(str(error), may_be_secondary=False)
        rendezvous.leave(briefly=True)
        raise
    except RAISED_ON_ALL_RANKS as error:
        rendezvous.leave(briefly=not isinstance(error, SystemExit))
        if isinstance(error, ConfigError):
            error.all_ranks_raised = True
        raise
    except BaseException as error:
        rendezvous.fail(error)
    else:
        rendezvous.leave()


@contextmanager
def initialize(
    launch: Launch,
    store: dist.Store,
    device: torch.device,
    backend: str | None,
    timeout_s: float,
    watchdog: Watchdog | None = None,
) -> Iterator[None]:
    """Select the rank's GPU and connect the rank to all others through ``store``. Disconnect it at the end."""
    if device.type == "cuda":
        if torch.version.hip:
            compile_cache.set_environment()  # MIOpen compiles kernels
        backend = backend or "cpu:gloo,cuda:nccl"
    gpu.select(device)
    if watchdog:
        watchdog.device = device
    timeout = gpu.backend_timeout(timeout_s)
    with watchdog.limit("connecting all ranks") if watchdog else nullcontext():
        dist.init_process_group(
            backend or "gloo", rank=launch.rank, world_size=launch.world_size, store=store, timeout=timeout
        )
    try:
        yield
    except BaseException as error:
        if isinstance(error, RAISED_ON_ALL_RANKS):
            dist.destroy_process_group()  # after any other error, this call blocks on ranks that have exited
        raise
    dist.destroy_process_group()
