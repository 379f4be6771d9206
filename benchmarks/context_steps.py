"""Forward and backward of sequences that several ranks share: settings and grids."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.settings import DeviceConfig, arguments_of
from benchmarks.workloads import Workload
from gpt4d.model.llama import LlamaConfig

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
