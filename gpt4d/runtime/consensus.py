"""Operations in which all ranks of the job agree: fail together, gather objects, run something on rank 0."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt4d.config import ConfigError

T = TypeVar("T")
_KEEPALIVE_S = 60.0


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Return this rank's ``work()`` once it has succeeded on every rank. If it fails on any rank, all ranks raise."""
    error: Exception | None = None
    try:
        result = work()
    except ConfigError as raised:
        error = raised
    except Exception as raised:
        traceback.print_exc()
        error = RuntimeError(f"rank {dist.get_rank()} failed: {raised!r}")
    for first_error in filter(None, all_gather_object(error)):
        raise first_error
    return result


def all_gather_object(value: T) -> list[T]:
    """Return the ``value`` of every rank, in rank order. All ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_ranks_true(flag: bool) -> bool:
    """Return whether ``flag`` is true on every rank. All ranks must call this."""
    minimum = torch.tensor(int(flag))
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return bool(minimum)


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank, however long it takes. All ranks must call this.

    A ConfigError is raised on every rank. After any other exception rank 0 raises it and the others a RuntimeError.
    """
    if not dist.is_initialized():
        return work()
    outcome: tuple[Any, Exception | None] | None = None
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        with _keepalive_broadcasts():
            try:
                outcome = work(), None
            except ConfigError as raised:
                outcome = None, raised
            except BaseException as raised:
                outcome, failure = (None, RuntimeError(f"rank 0 failed: {raised!r}")), raised
    while (received := _broadcast_from_rank0(outcome)) is None:
        pass  # None is a keepalive
    if failure is not None:
        raise failure
    result, error = received
    if error is not None:
        raise error
    return result


def _broadcast_from_rank0(value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


@contextmanager
def _keepalive_broadcasts() -> Iterator[None]:
    """Broadcast None periodically while the body runs: gloo fails a broadcast that does not start within 30 minutes."""
    finished = threading.Event()

    def broadcast_until_finished() -> None:
        while not finished.wait(_KEEPALIVE_S):
            _broadcast_from_rank0(None)

    thread = threading.Thread(target=broadcast_until_finished, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
