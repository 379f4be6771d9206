"""Cost of counting the collectives.

    python -m benchmarks overhead [layers=4] [hidden=256] [vocabulary=8192] [length=256] [batch=8] [repeats=20]

Two processes on 1×2×1×1 alternate training steps with and without counting bytes and seconds of collectives.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from benchmarks.adapters.gpt4d import Training
from benchmarks.cluster import LocalHost
from benchmarks.driver import print_rows
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import arguments_of
from benchmarks.worker import Contender
from benchmarks.workloads import OneDeviceConfig
from gpt4d.config import GridSizes
from gpt4d.parallel.comm import collectives

PACKAGES = ("torch",)


@dataclass
class Settings(OneDeviceConfig):
    repeats: int = 20
    out: str = "benchmarks/results/overhead"


def ratio(row: dict, baseline: dict) -> float:
    """Return the median ratio of ``row``'s step time to ``baseline``'s step time in the same repetition."""
    return statistics.median(a / b for a, b in zip(row["seconds"], baseline["seconds"], strict=True))


def run(settings: Settings) -> Iterator[dict]:
    spec = WorkerSpec("two processes", __name__, "counting", "torch", arguments_of(settings, OneDeviceConfig))
    rows = interleave(LocalHost(2), [spec], settings.repeats)
    print_rows(rows)
    counted = ratio(*rows)
    print(f"{rows[0]['name']} / {rows[1]['name']}: {counted:.3f}")
    shared = {field.name: getattr(settings, field.name) for field in fields(OneDeviceConfig)}
    yield {**shared, "ratio": counted, "rows": rows}


class UncountedCollective:
    """A replacement for ``traffic.InFlightCollective`` that counts nothing."""

    def __init__(self, traffic, work: dist.Work, device: torch.device, sent_bytes: float, overlaps: bool):
        self.work = work

    def wait(self) -> None:
        self.work.wait()


def counting(settings: OneDeviceConfig, device: None) -> dict[str, Contender]:
    # The y axis has the largest number of collectives: collectives of linear layers, and two small ones per norm.
    training = Training(str(GridSizes(y=dist.get_world_size())), settings.work)
    counted_collective = collectives.InFlightCollective

    def step_uncounted() -> Callable[[], dict]:
        collectives.InFlightCollective = UncountedCollective
        try:
            return training.step()
        finally:
            collectives.InFlightCollective = counted_collective

    return {"counted": Contender(training.step), "not counted": Contender(step_uncounted)}
