"""What all ranks do alike: they fail together, hold something together, learn what the first of them found."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from gpt4d.config import ConfigError

T = TypeVar("T")
_SIGN_OF_LIFE_S = 60.0


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """What ``work`` returns here, once it has succeeded on every rank. If it failed on any, all ranks raise alike."""
    result, error = None, None
    try:
        result = work()
    except ConfigError as raised:
        error = raised
    except Exception as raised:
        traceback.print_exc()
        error = RuntimeError(f"rank {dist.get_rank()} failed: {raised!r}")
    for failure in filter(None, all_gather_object(error)):
        raise failure
    return result


def all_gather_object(value: T) -> list[T]:
    """The ``value`` of each rank. All ranks call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_ranks_true(flag: bool) -> bool:
    """Whether ``flag`` holds on every rank. All ranks ask."""
    everywhere = torch.tensor(int(flag))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def run_on_rank0(work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0, on every rank, however long it takes.

    A ConfigError there is raised on every rank alike; after any other failure no rank goes on.
    """
    if not dist.is_initialized():
        return work()
    outcome, failure = None, None
    if dist.get_rank() == 0:
        with _others_kept_waiting():
            try:
                outcome = work(), None
            except ConfigError as error:
                outcome = None, error
            except BaseException as raised:
                outcome, failure = (None, RuntimeError(f"rank 0 failed: {raised!r}")), raised
    while (received := _from_first_rank(outcome)) is None:
        pass  # a sign of life
    if failure is not None:
        raise failure
    result, error = received
    if error is not None:
        raise error
    return result


def _from_first_rank(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextmanager
def _others_kept_waiting() -> Iterator[None]:
    """Gives the other ranks signs of life: a broadcast that nobody begins is an error after half an hour."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_SIGN_OF_LIFE_S):
            _from_first_rank(None)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
