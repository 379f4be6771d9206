"""Times of work on a device."""

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Return the seconds of one call of ``work``, the mean of ``repeats`` calls after ``warm_up`` others."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / repeats
