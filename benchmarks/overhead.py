"""What our layers cost where there is nothing to communicate, and what counting costs where there is.

    python -m benchmarks.overhead [layers=4] [hidden=256] [heads=8] [vocab=8192] [seq=256] [batch=8] [repeats=20]

One process of one thread: training steps of our GPT on a grid of one device and of the same GPT-2 in plain torch.nn
take turns. Then two processes on 1×2×1×1: steps whose collectives are counted and steps whose are not take turns.
Writes the figures as ``out``.json.
"""

import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.interleave import Entry, interleave
from benchmarks.workers.single_device import Sizes
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors


@dataclass
class OverheadBenchmark(Sizes):
    repeats: int = 20
    out: str = "docs/overhead"


def ratio(one: dict, other: dict) -> float:
    """How many times the other's step one's takes: the median over the turns, each of which has a step of both."""
    return statistics.median(a / b for a, b in zip(one["seconds"], other["seconds"], strict=True))


def main(arguments: list[str]) -> None:
    config = from_arguments(OverheadBenchmark, arguments)
    sizes = {field.name: getattr(config, field.name) for field in fields(Sizes)}
    words = tuple(f"{key}={value}" for key, value in sizes.items())
    rows, ratios = [], {}
    for family, ranks in (("one process", 1), ("two processes", 2)):
        pair = interleave(
            LocalHost(ranks), [Entry(family, "benchmarks.workers.single_device", arguments=words)], config.repeats
        )
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
