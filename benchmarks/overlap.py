"""Time saved by each communication overlap (4D paper, Fig. 3) on an emulated cluster, ours and AxoNN's.

    python -m benchmarks.overlap [mbit=400] [repeats=5] [out=docs/overlap]

Runs the forward and backward of transformer blocks on a 2×2×2 grid of two hosts with four ranks each, in float32 with
full activation checkpointing. All settings alternate step by step in one run. AxoNN's blocks take part if it is
installed. Writes the figures to ``out``.json and draws them in ``out``.png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster, EmulatedClusterConfig
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.workers.blocks import BATCH, HIDDEN, LAYERS, LENGTH, SIZES
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors


@dataclass
class OverlapBenchmark:
    mbit: float = 400.0
    repeats: int = 5
    out: str = "docs/overlap"


def main(arguments: list[str]) -> None:
    config = from_arguments(OverlapBenchmark, arguments)
    specs = [
        WorkerSpec("ours", "benchmarks.workers.blocks_ours"),
        WorkerSpec("AxoNN", "benchmarks.workers.blocks_axonn", needs="axonn"),
    ]
    with EmulatedCluster(EmulatedClusterConfig(hosts=2, ranks=4, mbit=config.mbit)) as cluster:
        rows = interleave(cluster, specs, config.repeats)
    for row in rows:
        print(report.line(row))
    settings = {"uplink_mbit_per_s": config.mbit, "grid": str(SIZES), "batch": BATCH, "length": LENGTH}
    out, command = Path(config.out), "python -m benchmarks.overlap " + " ".join(arguments)
    report.write(out, command.strip(), report.machine("torch", "axonn"), rows, **settings)
    report.bars(rows, out, f"{LAYERS} blocks of {HIDDEN}, grid {SIZES}, activation checkpointing")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
