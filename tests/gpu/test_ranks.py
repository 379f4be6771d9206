"""Checks 5 and 9: several ranks train as one rank does, reshard, and report a hang and a lost rank.

The ranks of check 5 share a GPU and communicate through gloo. In check 9 they communicate through NCCL: each GPU gets a
rank, up to four. A single GPU gets two, which NCCL 2.30 and newer allow. The trainer's preflight checks forbid that, so
the ranks use the parts of the trainer directly.
"""

import math
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.plan import plan
from gpt4d.parallel.resharding.transfer import Link
from gpt4d.runtime import rendezvous, watchdog
from gpt4d.runtime.hangs import HangDetector
from gpt4d.runtime.job import JobContext, process_group
from gpt4d.runtime.launch import Launch
from tests.gpu.check import Check, Unavailable
from tests.gpu.isolation import redirect_output
from tests.gpu.processes import exit_codes, in_process, run_processes, run_ranks
from tests.gpu.small_training import GridCase, build_step, compare, train_on_grids

_RANKS_OF_SHARED_GPU = 8
_CASES_OF_SHARED_GPU = [GridCase(GridSizes(2, 2, 2, 1)), GridCase(GridSizes(1, 2, 2, 2), shard_states=True)]
_NCCL_OF_SHARED_GPU = (2, 30)
_CASES = {
    2: [GridCase(GridSizes(1, 1, 2, 1)), GridCase(GridSizes(2, 1, 1, 1)), GridCase(GridSizes(1, 1, 1, 2), True)],
    4: [GridCase(GridSizes(2, 2, 1, 1)), GridCase(GridSizes(1, 1, 2, 2), True)],
}
_TIMEOUT_S = {"cuda": 5.0, "cpu": 1.0}  # timeout of a collective
_LONG_S = 60.0
_WARM_UP = 2  # steps before the watchdog looks for hangs
_SHAPE = (64, 48, 32)  # shape of the tensors that are moved between meshes
_TRANSFERS = 3
_HANG = r"hang: rank 0 on \S+ waited \d+ s .* for (\S+ \S+) of (\S+): rank 1 on \S+ has not started it"
_LOST = r"rank 1 on \S+ failed: no sign of life"
Member = Callable[[JobContext], Any]
"""Function that each rank of a job executes in the job's process group."""


@pytest.mark.gpu(number=5, part=1, limit_s=110)
def test_eight_ranks_on_one_gpu_train_as_one_rank_does(check: Check) -> None:
    backend = "cpu:gloo,cuda:gloo" if check.device.type == "cuda" else "gloo"
    compare(check, run_ranks(_RANKS_OF_SHARED_GPU, backend, train_on_grids, _CASES_OF_SHARED_GPU, check.device))


@pytest.mark.gpu(number=9, part=3, limit_s=180)
def test_ranks_train_and_reshard_and_name_a_hang_and_a_lost_rank(check: Check) -> None:
    gpus = 0
    if not check.rehearsal:
        gpus, nccl = in_process(_describe)
        if gpus == 1 and nccl < _NCCL_OF_SHARED_GPU:
            version = ".".join(map(str, nccl))
            raise Unavailable(f"one GPU with NCCL {version}; use several GPUs, or NCCL 2.30, where ranks can share one")
    ranks = 4 if gpus >= 4 else 2
    answers = run_processes(_job(ranks, gpus, partial(_train_and_reshard, _CASES[ranks])))
    check.require(all(resharded for _, resharded in answers), "a resharded tensor is not the one that was sent")
    compare(check, [losses for losses, _ in answers])

    for name, stop, timeout_s, pattern, codes in (
        ("hang", _sleep, _TIMEOUT_S[check.device_type], _HANG, [1, 1]),
        ("lost", _die, _LONG_S, _LOST, [1, -signal.SIGKILL]),
    ):
        directory = check.directory / name
        directory.mkdir()
        members = _job(2, gpus, partial(_stop_rank_1, stop, timeout_s, directory), directory)
        check.require(exit_codes(members, _LONG_S) == codes, f"{name}: the exit codes of the ranks are not {codes}")
        output = (directory / "rank_0").read_text(errors="replace")
        found = re.search(pattern, output)
        check.values[name] = found[0] if found else output
        check.require(bool(found), f"{name}: rank 0 does not print a message of the form {pattern!r}")
    check.figure = f"{ranks} ranks: {check.figure}, a hang and a lost rank are named"


def _describe() -> tuple[int, tuple[int, ...]]:
    return torch.cuda.device_count(), torch.cuda.nccl.version()


def _job(ranks: int, gpus: int, member: Member, logs: Path | None = None) -> list[Callable[[], Any]]:
    """Return the calls that run ``member`` on each rank of a job, as processes on ``gpus`` GPUs (0: on the CPU)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        master = f"localhost:{free.getsockname()[1]}"
    return [partial(_run_member, Launch(rank, ranks, rank, ranks, master), gpus, member, logs) for rank in range(ranks)]


def _run_member(launch: Launch, gpus: int, member: Member, logs: Path | None) -> Any:
    if logs is not None:
        redirect_output(logs / f"rank_{launch.rank}")
    if gpus == 1:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # A lost rank is found sooner than in training, where ranks may be slow.
    watchdog.HEARTBEAT_S, watchdog.SILENT_S, watchdog.SILENT_AFTER_ERROR_S = 0.2, 10.0, 2.0
    rendezvous.NOTICE_S = 1.0
    device = torch.device("cuda", launch.rank % gpus) if gpus else torch.device("cpu")
    with process_group(launch, device) as job:
        return member(job)


def _train_and_reshard(cases: list[GridCase], job: JobContext) -> tuple[dict[str, list[float]], bool]:
    return train_on_grids(cases, job.device), _reshard(job.device)


def _reshard(device: torch.device) -> bool:
    """Move tensors from the first half of the ranks to the second. Return whether this rank received the right ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    half = size // 2
    source = StageMesh.of_grid(range(half), GridSizes(x=half), size)
    destination = StageMesh.of_grid(range(half, size), GridSizes(y=half), size)
    layouts = Layout((), ("x",), ()), Layout((), (), ("y",))
    sends = rank < half
    tile = source.tiles(_SHAPE, layouts[0])[rank] if sends else destination.tiles(_SHAPE, layouts[1])[rank]
    link = Link("check", dist.new_group(), device)
    resharding = link.prepare(plan(_SHAPE, layouts[0], source, layouts[1], destination), torch.float32)
    right = True
    for salt in range(_TRANSFERS):
        full = (torch.arange(math.prod(_SHAPE), device=device).view(_SHAPE) * 37 + salt) % 251
        part = full[tuple(slice(*bounds) for bounds in tile)].float().contiguous()
        received = resharding.start(part if sends else None).wait()
        right &= received is None if sends else torch.equal(received, part)
    link.close()
    return right


def _stop_rank_1(stop: Callable[[], object], timeout_s: float, directory: Path, job: JobContext) -> None:
    """Train on two ranks along z, of which rank 1 calls ``stop`` after some steps."""
    grid = Grid(GridSizes(z=2), job.device.type)
    step, batch, tokens = build_step(GridCase(grid.sizes), grid, job.device)
    for number in range(_WARM_UP + 2):
        if number == _WARM_UP:
            assert job.watchdog is not None
            job.watchdog.hang_detector = HangDetector(grid.active_axes, timeout_s, directory)
            job.watchdog.hang_detector.name_layers(step.stage.module)
            job.watchdog.hang_detector.end_startup()
            if grid.world.index == 1:
                stop()
        step([batch], 1, tokens, 1e-3).loss.item()


def _sleep() -> None:
    threading.Event().wait()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
