"""Time saved by each communication overlap (4D paper, Fig. 3) on an emulated cluster, ours and AxoNN's.

    python -m benchmarks.overlap [grid=2x2x2] [mbit=400] [repeats=5] [virtual=true] [out=benchmarks/results/overlap]

Runs the forward and backward of transformer blocks on a grid x·y·z of two hosts with four ranks each, in float32 with
full activation checkpointing. All settings alternate step by step in one run. AxoNN's blocks take part if it is
installed. Writes the figures to ``out``.json and draws them in ``out``.png. ``benchmarks.settings`` explains
``virtual`` and its settings.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import DeviceConfig, parse_grids, read_arguments
from benchmarks.workers.blocks import workload
from gpt4d.runtime.errors import one_line_errors


@dataclass
class OverlapBenchmark(DeviceConfig):
    grid: str = "2x2x2"  # x·y·z
    out: str = "benchmarks/results/overlap"


def main(arguments: list[str]) -> None:
    config = read_arguments(OverlapBenchmark, arguments)
    grid = parse_grids(f"{config.grid}x1", config.hosts * config.ranks)
    model, batch, _ = workload(config.virtual)
    specs = [
        WorkerSpec("ours", "benchmarks.workers.blocks_ours", arguments=config.worker_arguments(grid)),
        WorkerSpec("AxoNN", "benchmarks.workers.blocks_axonn", "axonn", config.worker_arguments(grid)),
    ]
    with EmulatedCluster(config) as cluster:
        rows = interleave(cluster, specs, config.repeats, config.warm_up)
    for row in rows:
        print(report.line(row))
    settings = {**config.description(), "grid": grid[0], "batch": batch, "length": model.max_positions}
    out, command = Path(config.out), "python -m benchmarks.overlap " + " ".join(arguments)
    report.write(out, command.strip(), report.machine("torch", "axonn"), rows, **settings)
    report.bars(rows, out, f"{model.layers} blocks of {model.hidden}, grid {grid[0]}, activation checkpointing")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
