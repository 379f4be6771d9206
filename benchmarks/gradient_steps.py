"""Contenders whose forward and backward are measured, or whose gradients are stored and compared."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.laboratory.memory import allocated_peak
from benchmarks.worker import Contender


class GradientStep(Protocol):
    """Forward and backward of this rank's tokens, and of the reduction of gradients."""

    def forward_backward(self) -> object:
        """Compute all gradients."""

    def collect_results(self) -> dict:
        """Delete the gradients, and return additional results."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of global tensors, with the same names for all contenders. Every rank calls it."""


def gradient_file(directory: str | Path, name: str) -> Path:
    """Return the file for the gradients of a contender."""
    return Path(directory) / f"{name.replace('/', '_')}.pt"


def gradient_contender(name: str, step: GradientStep, directory: str) -> Contender:
    """Return a contender that runs ``step``, or that stores its gradients in a directory and measures its memory."""

    def measure_time() -> Callable[[], dict]:
        step.forward_backward()
        return step.collect_results

    def store_gradients() -> Callable[[], dict]:
        peak = torch.tensor(allocated_peak(step.forward_backward))
        gradients = step.gradients()
        if dist.get_rank() == 0:
            torch.save(gradients, gradient_file(directory, name))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return lambda: {**step.collect_results(), "peak_mib": peak.item() / 2**20}

    return Contender(store_gradients if directory else measure_time)


def compared_gradients(ranks: int, specs: Iterable[WorkerSpec], directory: str) -> list[dict]:
    """Return a row for each contender with the difference of its gradients to the first contender's.

    Args:
        ranks: number of processes of a contender.
        specs: workers that store gradients in ``directory``.
        directory: an empty directory.
    """
    rows = interleave(LocalHost(ranks), specs, 1, 0)
    expected: dict[str, torch.Tensor] = {}
    for row in rows:
        found = torch.load(gradient_file(directory, row["name"]), weights_only=True)
        expected = expected or found
        row["gradient_difference"] = largest_difference(found, expected)
    return rows


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest norm of the difference of two gradients of a parameter, relative to the gradient's norm."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())


def global_tensor(part: torch.Tensor, shape: Sequence[int], place: tuple[slice, ...]) -> torch.Tensor:
    """Return a global tensor from the ranks' parts at ``place``. Equally many ranks have each element."""
    total = part.new_zeros(shape)
    total[place] = part
    dist.all_reduce(total)
    return total * (total.numel() / (part.numel() * dist.get_world_size()))
