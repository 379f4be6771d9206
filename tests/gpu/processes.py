"""Processes that a check starts: single ones, and the ranks of a process group.

They are forked, which is fast and needs no pickling. Therefore the calling process must neither use CUDA nor compute
with several threads before: whatever does so runs in a process of its own. Composing a configuration uses CUDA, because
``cluster=auto`` describes the GPU.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt4d.config.machine import this_machine
from tests.gpu.isolation import describe_error

T = TypeVar("T")
_NOTICE_S = 10.0  # time for further ranks to fail: their errors may be the cause


def in_process(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, called in a process of its own. Raises RuntimeError with its error if it fails."""
    return run_processes([partial(function, *args)])[0]


def run_ranks(world_size: int, backend: str, function: Callable[..., T], *args: Any) -> list[T]:
    """Return the results of ``function(*args)`` on the ranks of a new process group."""
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        ranks = range(world_size)
        return run_processes([partial(_in_group, rank, world_size, backend, store, function, args) for rank in ranks])


def _in_group(
    rank: int, world_size: int, backend: str, store: Path, function: Callable[..., T], args: Sequence[Any]
) -> T:
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    dist.init_process_group(backend, store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    result = function(*args)
    dist.barrier()  # A rank that exits early breaks the connections of its peers.
    return result


def run_processes(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of ``calls``, each in a process of its own. Raises RuntimeError with all errors."""
    fork = _fork_context()
    processes, waiting = [], dict[Connection, int]()
    for number, call in enumerate(calls):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_call, args=(call, sender))
        process.start()
        sender.close()
        processes.append(process)
        waiting[receiver] = number
    results: list[Any] = [None] * len(calls)
    problems: dict[int, str] = {}
    while waiting and (ready := wait(list(waiting), _NOTICE_S if problems else None)):
        for receiver in ready:
            number = waiting.pop(receiver)
            try:
                error, results[number] = receiver.recv()
            except EOFError:
                error = "the process died"
            if error:
                problems[number] = error
    if problems:
        raise RuntimeError("; ".join(f"process {number}: {text}" for number, text in sorted(problems.items())))
    for process in processes:
        process.join()  # which frees its memory on the GPU
    return results


def exit_codes(calls: Sequence[Callable[[], object]], limit_s: float) -> list[int | None]:
    """Return the exit codes of processes that run ``calls``: negative after a signal, None if not ended in time."""
    fork = _fork_context()
    processes = [fork.Process(target=call) for call in calls]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def _fork_context() -> multiprocessing.context.ForkContext:
    described = this_machine.cache_info().currsize
    assert not described and not torch.cuda.is_initialized(), "this process has used CUDA, and cannot be forked"
    return multiprocessing.get_context("fork")


def _call(call: Callable[[], object], sender: Connection) -> None:
    try:
        answer = None, call()
    except BaseException as error:
        traceback.print_exc()
        answer = describe_error(error), None
    sender.send(answer)
