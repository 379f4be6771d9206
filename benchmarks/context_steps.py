"""Forward and backward of sequences that several ranks share: settings, grids, and the steps of a worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.settings import DeviceConfig, arguments_of
from benchmarks.worker import Contender
from benchmarks.workloads import Workload
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.testing.memory import allocated_peak

_INNER_MULTIPLE = 64
_SUFFIXES = {"all_gather": "", "ring": "/ring"}  # in the names of grids


@dataclass
class ContextConfig(DeviceConfig):
    """A Llama, and one sequence for all ranks."""

    length: int = 8192  # tokens of the sequence
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    key_value_heads: int = 2
    vocabulary: int = 512
    mbit: float = 200.0
    virtual: bool = True
    skips_masked_products = True  # the contenders have unequal shares of masked keys

    @property
    def work(self) -> Workload:
        inner = _INNER_MULTIPLE * max(1, round(self.hidden * 8 / 3 / _INNER_MULTIPLE))
        model = LlamaConfig(
            "benchmark",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            head_size=self.hidden // self.heads,
            inner=inner,
            vocab_size=self.vocabulary,
            vocab_multiple=64,
            max_positions=self.length,
        )
        return Workload(model, batch=1, steps=1)


@dataclass
class ContextWorkerConfig(ContextConfig):
    grids: str = ""  # grids that the worker runs, separated by commas
    gradients: str = ""  # directory for gradients, which are stored in place of measuring time; empty: measure time


def worker_arguments(settings: ContextConfig, grids: Sequence[str] = (), **changes: object) -> tuple[str, ...]:
    """Return the command-line arguments from which a worker reads its ``ContextWorkerConfig``."""
    return arguments_of(settings, ContextConfig, grids=",".join(grids), **changes)


def context_grids(ranks: int, exchanges: Sequence[str]) -> list[str]:
    """Return the grids that share one sequence among ``ranks`` ranks, with each exchange, and at last x alone.

    With x, sequence parallelism splits the tokens between the layers.
    """
    grids = []
    for exchange in exchanges:
        suffix = _SUFFIXES[exchange]
        grids += [f"1x1x1x{ranks}/context={ranks}{suffix}", f"1x1x{ranks}x1/context={ranks}{suffix}"]
        for x in (2, 4):
            if ranks > x:
                grids.append(f"{x}x1x1x{ranks // x}/context={ranks // x}/tokens{suffix}")
    return [*grids, f"{ranks}x1x1x1/tokens"]


class ContextStep(Protocol):
    """Forward and backward of this rank's tokens, and of the reduction of gradients."""

    def forward_backward(self) -> torch.Tensor:
        """Compute all gradients and return this rank's loss."""

    def collect_results(self) -> dict:
        """Delete the gradients, and return the mean loss of all tokens and further results."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of global tensors with the names of a ``TorchLlama``. Every rank calls it."""


def gradient_file(directory: str | Path, name: str) -> Path:
    """Return the file for the gradients of a contender."""
    return Path(directory) / f"{name.replace('/', '_')}.pt"


def context_contender(name: str, step: ContextStep, settings: ContextWorkerConfig) -> Contender:
    """Return a contender that runs ``step``, or that stores its gradients and measures its memory."""

    def measure_time() -> Callable[[], dict]:
        step.forward_backward()
        return step.collect_results

    def store_gradients() -> Callable[[], dict]:
        peak = torch.tensor(allocated_peak(step.forward_backward))
        gradients = step.gradients()
        if dist.get_rank() == 0:
            torch.save(gradients, gradient_file(settings.gradients, name))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return lambda: {**step.collect_results(), "peak_mib": peak.item() / 2**20}

    return Contender(store_gradients if settings.gradients else measure_time)
