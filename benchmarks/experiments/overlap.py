"""Time saved by each communication overlap (4D paper, Fig. 3) on an emulated cluster, in gpt4d and AxoNN.

    python -m benchmarks overlap [grid=2x2x2] [mbit=400] [repeats=5] [virtual=true] [out=benchmarks/results/overlap]

Runs the forward and backward of transformer blocks on a grid x·y·z of two hosts with four ranks each, in float32 with
full activation checkpointing. All settings alternate step by step in one run. AxoNN's blocks take part if it is
installed. ``benchmarks.settings`` explains ``virtual`` and its settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.driver import measure, print_rows
from benchmarks.interleave import contenders
from benchmarks.settings import DeviceConfig, parse_grids
from benchmarks.workloads import block_workload

PACKAGES = ("torch", "axonn")


@dataclass
class Settings(DeviceConfig):
    grid: str = "2x2x2"  # x·y·z
    out: str = "benchmarks/results/overlap"


def run(settings: Settings) -> Iterator[dict]:
    grid = parse_grids(f"{settings.grid}x1", settings.hosts * settings.ranks)
    work = block_workload(settings.virtual)
    rows = measure(
        settings, [contenders(name, "blocks", settings.worker_arguments(grid)) for name in ("ours", "AxoNN")]
    )
    print_rows(rows)
    sizes = {"grid": grid[0], "batch": work.batch, "length": work.model.max_positions}
    yield {**settings.description(), **sizes, "rows": rows}


def plot(settings: Settings, results: dict) -> Any:
    model = block_workload(settings.virtual).model
    title = f"{model.layers} blocks of {model.hidden}, grid {results['grid']}, activation checkpointing"
    return report.bars(results["rows"], title)
