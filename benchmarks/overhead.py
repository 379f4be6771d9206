"""Overhead of our layers without communication, and of counting the collectives with it.

    python -m benchmarks.overhead [layers=4] [hidden=256] [heads=8] [vocab=8192] [seq=256] [batch=8] [repeats=20]

One process with one thread alternates training steps of our GPT on a grid of one device and of the same GPT-2 in plain
torch.nn. Then two processes on 1×2×1×1 alternate steps with and without counting. Writes the figures to ``out``.json.
"""

import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.workers.single_device import ModelSizes
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors


@dataclass
class OverheadBenchmark(ModelSizes):
    repeats: int = 20
    out: str = "docs/overhead"


def ratio(row: dict, baseline: dict) -> float:
    """Return the median over all turns of ``row``'s step time divided by ``baseline``'s in the same turn."""
    return statistics.median(a / b for a, b in zip(row["seconds"], baseline["seconds"], strict=True))


def main(arguments: list[str]) -> None:
    config = from_arguments(OverheadBenchmark, arguments)
    sizes = {field.name: getattr(config, field.name) for field in fields(ModelSizes)}
    worker_arguments = tuple(f"{key}={value}" for key, value in sizes.items())
    rows, ratios = [], {}
    for family, ranks in (("one process", 1), ("two processes", 2)):
        spec = WorkerSpec(family, "benchmarks.workers.single_device", arguments=worker_arguments)
        pair = interleave(LocalHost(ranks), [spec], config.repeats)
        for row in pair:
            print(report.line(row))
        ratios[family] = ratio(*pair)
        print(f"{pair[0]['name']} / {pair[1]['name']}: {ratios[family]:.3f}")
        rows += pair
    command = "python -m benchmarks.overhead " + " ".join(arguments)
    report.write(Path(config.out), command.strip(), report.machine("torch"), rows, **sizes, ratios=ratios)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
