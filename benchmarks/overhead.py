"""Cost of counting the collectives.

    python -m benchmarks.overhead [layers=4] [hidden=256] [vocabulary=8192] [length=256] [batch=8] [repeats=20]

Two processes on 1×2×1×1 alternate training steps with and without counting bytes and seconds of collectives. Writes the
figures to ``out``.json.
"""

import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.workers.one_device import OneDeviceConfig
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors


@dataclass
class OverheadBenchmark(OneDeviceConfig):
    repeats: int = 20
    out: str = "benchmarks/results/overhead"


def ratio(row: dict, baseline: dict) -> float:
    """Return the median over all turns of ``row``'s step time divided by ``baseline``'s in the same turn."""
    return statistics.median(a / b for a, b in zip(row["seconds"], baseline["seconds"], strict=True))


def main(arguments: list[str]) -> None:
    config = from_arguments(OverheadBenchmark, arguments)
    settings = {field.name: getattr(config, field.name) for field in fields(OneDeviceConfig)}
    worker_arguments = tuple(f"{key}={value}" for key, value in settings.items())
    spec = WorkerSpec("two processes", "benchmarks.workers.counting", arguments=worker_arguments)
    rows = interleave(LocalHost(2), [spec], config.repeats)
    for row in rows:
        print(report.line(row))
    counted = ratio(*rows)
    print(f"{rows[0]['name']} / {rows[1]['name']}: {counted:.3f}")
    command = "python -m benchmarks.overhead " + " ".join(arguments)
    report.write(Path(config.out), command.strip(), report.machine("torch"), rows, **settings, ratio=counted)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
