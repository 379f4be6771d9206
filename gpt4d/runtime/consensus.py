"""Operations in which all ranks of the job agree: fail together, gather values, run a function on rank 0.

Values are sent as JSON, never as pickles, so that a message cannot execute code.
"""

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt4d.runtime.activity import MAIN, Track
from gpt4d.runtime.errors import ConfigError

T = TypeVar("T")
KEEPALIVE_S = 60.0


def run_on_all_ranks(
    work: Callable[[], T], name: str, track: Track = MAIN, group: dist.ProcessGroup | None = None
) -> T:
    """Return this rank's ``work()`` once it has succeeded on every rank. If it fails on any rank, all ranks raise.

    The first rank that fails raises its exception. All other ranks raise the same ConfigError, or a RuntimeError, and
    print the traceback of an exception of their own.

    ``name``: name of the work in reports ("loading the checkpoint"), as in all functions of this module. A thread other
    than the main thread has its own ``track`` and ``group``.
    """
    error: Exception | None = None
    with track.begin(name) as activity:
        try:
            result = work()
        except Exception as raised:
            error = raised
        with activity.waiting():
            try:
                errors = gather_in_group(error and _error_to_json(error, name), group)
            except Exception as lost:
                raise lost from error
    for rank, first_error in enumerate(errors):
        if first_error and error and rank == dist.get_rank(group):
            raise error
        if first_error:
            if error and not isinstance(error, ConfigError):
                traceback.print_exception(error)
            raise _error_from_json(first_error)
    return result


def all_gather_json(value: Any, name: str) -> list[Any]:
    """Return the ``value`` of every rank, in rank order. All ranks must call this.

    ``value`` consists of dicts with text keys, lists, texts, numbers, booleans and None.
    """
    with MAIN.begin(name) as activity, activity.waiting():
        return gather_in_group(value)


def gather_in_group(value: Any, group: dist.ProcessGroup | None = None, receiver: int | None = None) -> list[Any]:
    """Return the ``value`` of every rank of ``group``, in rank order. The watchdog does not observe this call.

    Args:
        value: as for ``all_gather_json``.
        group: ranks with a backend for the CPU; None for all ranks of the job. All its ranks must call this.
        receiver: the only rank of the job that receives the values, all other ranks return []; None for all ranks.
    """
    content = _encode(value)
    sizes = [torch.empty(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)]), group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    if receiver not in (None, dist.get_rank()):
        dist.gather(padded, None, receiver, group)
        return []
    contents = [torch.empty_like(padded) for _ in sizes]
    if receiver is None:
        dist.all_gather(contents, padded, group)
    else:
        dist.gather(padded, contents, receiver, group)
    return [_decode(received[: int(size)]) for received, size in zip(contents, sizes, strict=True)]


def all_ranks_true(flag: bool, name: str) -> bool:
    """Return whether ``flag`` is true on every rank. All ranks must call this."""
    minimum = torch.tensor(int(flag))
    with MAIN.begin(name) as activity, activity.waiting():
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return bool(minimum)


def run_on_rank0(work: Callable[[], T], name: str) -> T:
    """Run ``work`` on rank 0 and return its result on every rank, without a time limit. All ranks must call this.

    The result is a value as in ``all_gather_json``. A ConfigError is raised on every rank. Rank 0 raises any other
    exception, and every other rank raises a RuntimeError.
    """
    if not dist.is_initialized():
        return work()
    outcome: list | None = None  # the result, and the error
    failure: BaseException | None = None
    with MAIN.begin(name) as activity:
        if dist.get_rank() == 0:
            with _keepalive_broadcasts():
                try:
                    outcome = [work(), None]
                except BaseException as raised:
                    outcome = [None, _error_to_json(raised, name)]
                    failure = None if isinstance(raised, ConfigError) else raised
        with activity.waiting():
            while (received := broadcast_from_rank0(outcome)) is None:
                pass  # None is a keepalive
    if failure is not None:
        raise failure
    result, error = received
    if error is not None:
        raise _error_from_json(error)
    return result


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank. Values of other ranks are ignored."""
    content = _encode(value)
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=0)
    if dist.get_rank():
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return _decode(content)


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: torch.Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _error_to_json(error: BaseException, work: str) -> list[str]:
    """Return the class and the message with which other ranks raise this rank's error in ``work``."""
    known = isinstance(error, ConfigError)
    return [type(error).__name__, str(error) if known else f"{work}: rank {dist.get_rank()} failed: {error!r}"]


def _error_from_json(error: list[str]) -> Exception:
    """Return an error of the same class if it is ConfigError or derives from it, otherwise a RuntimeError."""
    classes, (name, message) = [ConfigError], error
    for known in classes:
        if known.__name__ == name:
            return known(message)
        classes += known.__subclasses__()
    return RuntimeError(message)


@contextmanager
def _keepalive_broadcasts() -> Iterator[None]:
    """Broadcast None periodically while the body runs: gloo fails a broadcast that does not start within 30 minutes."""
    finished = threading.Event()

    def broadcast_until_finished() -> None:
        while not finished.wait(KEEPALIVE_S):
            broadcast_from_rank0(None)

    thread = threading.Thread(target=broadcast_until_finished, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
