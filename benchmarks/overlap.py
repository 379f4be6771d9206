"""What each overlap saves (the 4D paper's Fig. 3), on an emulated cluster, beside what AxoNN's own save.

    python -m benchmarks.overlap [mbit=400] [repeats=5] [out=docs/overlap]

Transformer blocks on a 2×2×2 grid of two hosts of four ranks, with full activation checkpointing, forward and
backward, in float32. The settings take turns in one run, step by step. AxoNN's blocks take part where it is installed.
Writes the figures as ``out``.json and draws them as ``out``.png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import Cluster, ClusterConfig
from benchmarks.interleave import Entry, interleave
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
    teams = [
        Entry("ours", "benchmarks.workers.blocks_ours"),
        Entry("AxoNN", "benchmarks.workers.blocks_axonn", needs="axonn"),
    ]
    with Cluster(ClusterConfig(hosts=2, ranks=4, mbit=config.mbit)) as cluster:
        rows = interleave(cluster, teams, config.repeats)
    for row in rows:
        print(report.line(row))
    settings = {"uplink_mbit_per_s": config.mbit, "grid": str(SIZES), "batch": BATCH, "length": LENGTH}
    out, command = Path(config.out), "python -m benchmarks.overlap " + " ".join(arguments)
    report.write(out, command.strip(), report.machine("torch", "axonn"), rows, **settings)
    report.bars(rows, out, f"{LAYERS} blocks of {HIDDEN}, grid {SIZES}, activation checkpointing")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
