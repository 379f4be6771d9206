"""Checks 5 and 9: several ranks train as one rank does, reshard, and report a hang and a lost rank.

The ranks of check 5 share a GPU and communicate through gloo. In check 9 they communicate through NCCL: each GPU gets a
rank, up to four. A single GPU gets two, which NCCL 2.30 and newer allow. The trainer's preflight checks forbid that, so
the ranks use the parts of the trainer directly.
"""

import math
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import ClusterConfig, GridSizes
from gpt4d.config.machine import this_machine
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import mesh, transfer
from gpt4d.parallel.resharding.plan import plan
from gpt4d.planner.resolve import resolve
from gpt4d.planner.stages import PlanEstimate
from gpt4d.runtime import consensus, hangs, watchdog
from gpt4d.runtime import job as lifetime
from gpt4d.runtime.job import JobContext, process_group
from gpt4d.runtime.launch import Launch
from tests.gpu import usage
from tests.gpu.check import Check
from tests.gpu.isolation import redirect_output
from tests.gpu.processes import exit_codes, in_process, run_processes, run_ranks
from tests.gpu.small_training import Answer, GridCase, build_step, compare, local_batches, train_on_grids
from tests.support.jobs import free_port

_RANKS_OF_SHARED_GPU = 8
_SPLIT_TOKENS = {"chunks": 2, "sequence_parallel": True}
_CACHED = {"cache_layers": "all", "cache_scope": "step"}
_SELECTIVE = {"activation_checkpointing": "selective", "loss_chunks": 2}
_CASES_OF_SHARED_GPU = [
    GridCase(GridSizes(2, 2, 2, 1), parallel=_SPLIT_TOKENS),
    GridCase(GridSizes(1, 2, 2, 2), microbatches=2, shard_states=True, parallel=_CACHED, train=_SELECTIVE),
]
# Ranks that compile for themselves must still compute the same bits.
_COMPILED = GridCase(GridSizes(1, 2, 1, 1), compiled=True)
_CASES = {
    2: [
        GridCase(GridSizes(z=2)),
        GridCase(GridSizes(x=2), parallel=_SPLIT_TOKENS),
        GridCase(GridSizes(data=2), shard_states=True),
    ],
    4: [GridCase(GridSizes(2, 2, 1, 1), parallel=_SPLIT_TOKENS), GridCase(GridSizes(1, 1, 2, 2), shard_states=True)],
}
_PIPELINES = {ranks: GridCase(GridSizes(1, 1, ranks // 2, 1), stages=2, microbatches=4) for ranks in _CASES}
_TIMEOUT_S = {"cuda": 5.0, "cpu": 1.0}  # timeout of a collective
_LONG_S = 60.0
_WARM_UP = 2  # steps before the watchdog looks for hangs
_SHAPE = (64, 48, 32)  # shape of the tensors that are moved between meshes
_TRANSFERS = 3
_HANG = r"hang: rank 0 on \S+ waited \d+ s .* for (\S+ \S+) of (\S+): rank 1 on \S+ has not started it"
_LOST = r"rank 1 on \S+ failed: no sign of life"
Member = Callable[[JobContext], Any]
"""Function that each rank of a job executes in the job's process group."""


@pytest.mark.gpu(number=5, part=1, limit_s=115, functions=16, work_s=25)
def test_eight_ranks_on_one_gpu_train_as_one_rank_does(check: Check) -> None:
    backend = "cpu:gloo,cuda:gloo" if check.device.type == "cuda" else "gloo"
    figures = []
    for ranks, cases in ((_RANKS_OF_SHARED_GPU, _CASES_OF_SHARED_GPU), (2, [_COMPILED])):
        figures.append(compare(check, run_ranks(ranks, backend, train_on_grids, cases, check.device)))
    check.figure = "; ".join(figures)


@pytest.mark.gpu(number=9, part=2, limit_s=75, work_s=60)
def test_ranks_train_and_reshard_and_name_a_hang_and_a_lost_rank(check: Check) -> None:
    gpus = 0
    if not check.rehearsal:
        gpus, version = in_process(lambda: (torch.cuda.device_count(), usage.nccl_version()))
        if gpus == 1:
            usage.require_shared_gpu(version)
    ranks = 4 if gpus >= 4 else 2
    train = partial(train_on_grids, _CASES[ranks])
    answers = run_processes(_job(ranks, gpus, lambda job: (train(job.device), _reshard(job.device))))
    check.require(all(resharded for _, resharded in answers), "a resharded tensor is not the one that was sent")
    figures = [f"{ranks} ranks", compare(check, [losses for losses, _ in answers])]

    contexts, logged = usage.contexts(), usage.logging_communicators(check.directory)
    member = partial(_train_over_stages, _PIPELINES[ranks], check.directory)
    of_stages = run_processes(_job(ranks, gpus, member, environment=logged))
    figures.append(compare(check, [losses for losses, _ in of_stages]))
    if gpus:
        figures.append(check_usage(check, [used for _, used in of_stages], contexts, gpus))

    for name, stop, timeout_s, pattern, codes in (
        ("hang", threading.Event().wait, _TIMEOUT_S[check.device_type], _HANG, [1, 1]),
        ("lost", partial(signal.raise_signal, signal.SIGKILL), _LONG_S, _LOST, [1, -signal.SIGKILL]),
    ):
        directory = check.directory / name
        directory.mkdir()
        members = _job(2, gpus, partial(_stop_rank_1, stop, timeout_s, directory), directory)
        check.require(exit_codes(members, _LONG_S) == codes, f"{name}: the exit codes of the ranks are not {codes}")
        output = (directory / "rank_0").read_text(errors="replace")
        found = re.search(pattern, output)
        check.values[name] = found[0] if found else output
        check.require(bool(found), f"{name}: rank 0 does not print a message of the form {pattern!r}")
    check.figure = "; ".join([*figures, "a hang and a lost rank are named"])


def _job(
    ranks: int, gpus: int, member: Member, logs: Path | None = None, environment: Mapping[str, str] | None = None
) -> list[Callable[[], Any]]:
    """Return the calls that run ``member`` on each rank of a job, as processes on ``gpus`` GPUs (0: on the CPU)."""
    variables = {**(environment or {}), **(usage.SHARED_GPU_ENVIRONMENT if gpus == 1 else {})}
    master = f"localhost:{free_port()}"
    launches = (Launch(rank, ranks, rank, ranks, master) for rank in range(ranks))
    return [partial(_run_member, launch, gpus, member, logs, variables) for launch in launches]


def _run_member(launch: Launch, gpus: int, member: Member, logs: Path | None, variables: Mapping[str, str]) -> Any:
    if logs is not None:
        redirect_output(logs / f"rank_{launch.rank}")
    os.environ.update(variables)
    # A lost rank is found sooner than in training, where ranks may be slow.
    watchdog.HEARTBEAT_S, watchdog.SILENT_S, watchdog.SILENT_AFTER_ERROR_S = 0.2, 10.0, 2.0
    lifetime.NOTICE_S = 1.0
    device = torch.device("cuda", launch.rank % gpus) if gpus else torch.device("cpu")
    with process_group(launch, device) as job:
        return member(job)


class Usage(NamedTuple):
    """The use of a GPU after a training, on one of its ranks."""

    communicators: list[int]  # number of ranks of each communicator that NCCL has logged
    planned_communicators: int  # number of communicators that the planner counts
    planned_gib: float  # memory of libraries and communicators for which cluster=auto plans
    allocated_gib: float  # memory that torch's allocator has reserved
    used_gib: float  # memory of the GPU that all processes use
    contexts: Counter[str]  # number of processes on each GPU, by UUID


def _train_over_stages(case: GridCase, logs: Path, job: JobContext) -> tuple[dict[str, Answer], Usage]:
    answers = train_on_grids([case], job.device)
    consensus.all_gather_json(None, "waiting for the training of all ranks")
    plan = resolve(case.config(job.device), dist.get_world_size())
    found = Usage(
        usage.communicators(logs, os.getpid()),
        round(_planned_gib(plan, ClusterConfig(reserved_gib=0, communicator_gib=1))),
        _planned_gib(plan, this_machine()),
        usage.reserved_gib(job.device),
        usage.device_memory(job.device)[1],
        usage.contexts() if job.device.type == "cuda" else Counter(),
    )
    consensus.all_gather_json(None, "waiting for the measurements of all ranks")
    return answers, found


def _planned_gib(plan: PlanEstimate, cluster: ClusterConfig) -> float:
    """Return the memory that the planner reserves on this rank's device for libraries and communicators."""
    estimate = plan.with_config(replace(plan.config, cluster=cluster))
    return estimate.reserved_gib[plan.stage_of(dist.get_rank()).index]


def check_usage(check: Check, ranks: Sequence[Usage], before: Counter[str], gpus: int) -> str:
    """Require one context per rank, and communicators and memory as planned. Return a short text of the figures.

    Rank ``r`` is on GPU ``r % gpus``. ``before``: number of processes on each GPU before the job.
    """
    check.values["usage"] = [rank._asdict() for rank in ranks]
    for number, rank in enumerate(ranks):
        text = f"rank {number} has communicators of {rank.communicators} ranks, {rank.planned_communicators} planned"
        check.require(len(rank.communicators) == rank.planned_communicators, text)
    libraries, shares = [], [ranks[gpu::gpus] for gpu in range(min(gpus, len(ranks)))]
    for gpu, own in enumerate(shares):
        libraries.append(max(rank.used_gib for rank in own) - sum(rank.allocated_gib for rank in own))
        planned = sum(rank.planned_gib for rank in own)
        text = f"libraries and other processes take {libraries[-1]:.2f} GiB of GPU {gpu}, {planned:.2f} planned"
        check.require(libraries[-1] <= planned, text)
    contexts, expected = sorted((ranks[0].contexts - before).values()), sorted(map(len, shares))
    check.require(contexts in ([], expected), f"the GPUs have {contexts} contexts of the job, not {expected}")
    counted = f"{sum(contexts)} contexts" if contexts else "contexts not reported by nvidia-smi"
    return f"{counted}, {len(ranks[0].communicators)} communicators, libraries {max(libraries):.2f} GiB"


def _reshard(device: torch.device) -> bool:
    """Move tensors from the first half of the ranks to the second. Return whether this rank received the right ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    half = size // 2
    source = mesh.StageMesh.of_grid(range(half), GridSizes(x=half), size)
    destination = mesh.StageMesh.of_grid(range(half, size), GridSizes(y=half), size)
    layouts = Layout((), ("x",), ()), Layout((), (), ("y",))
    sends = rank < half
    tile = source.tiles(_SHAPE, layouts[0])[rank] if sends else destination.tiles(_SHAPE, layouts[1])[rank]
    link = transfer.Link("check", dist.new_group(), device)
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
    plan, step = build_step(GridCase(GridSizes(z=2)), job.device)
    grid, batches = step.stage.grid, local_batches(plan, step.stage)
    for number in range(_WARM_UP + 2):
        if number == _WARM_UP:
            assert job.ranks is not None
            detector = job.ranks.watchdog.hang_detector = hangs.HangDetector(grid.active_axes, timeout_s, directory)
            detector.name_layers(step.stage.module)
            detector.end_startup()
            if grid.world.index == 1:
                stop()
        step(batches, plan.microbatches, units=1, lr=1e-3).loss.item()
