"""Time of saving and loading, compared with a plain write, torch.save and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [mib=2048] [where=.] [repeats=5] [out=benchmarks/results/checkpoint]

Four ranks on this machine hold ``mib`` MiB of matrices, split by rows. The operations alternate in one run. The time
of ``save in the background`` is the time for which training waits. A load verifies all checksums first and reads from
the page cache. ``where`` is a directory on the disk to measure. Writes the figures to ``out``.json and draws them in
``out``.png.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors

RANKS = 4


@dataclass
class CheckpointBenchmark:
    mib: int = 2048
    where: str = "."
    repeats: int = 5
    out: str = "benchmarks/results/checkpoint"


def main(arguments: list[str]) -> None:
    config = from_arguments(CheckpointBenchmark, arguments)
    with tempfile.TemporaryDirectory(dir=config.where, prefix="benchmark-") as directory:
        worker_arguments = (f"mib={config.mib}", f"where={directory}")
        rows = interleave(
            LocalHost(RANKS),
            [WorkerSpec("ours", "benchmarks.workers.saving", arguments=worker_arguments)],
            config.repeats,
        )
    seconds = {row["name"]: row["median_s"] for row in rows}
    for row in rows:
        if row["name"].startswith("torch."):
            row["family"], _, row["name"] = row["name"].partition(".")
        elif row["name"].startswith("raw"):
            row["family"] = "plain"
        print(report.line(row))
    ratios = {
        "raw / save": seconds["raw write and fsync"] / seconds["save"],
        "waiting for a save in the background / save": seconds["save in the background"] / seconds["save"],
        "load, rows to columns / load": seconds["load, rows to columns"] / seconds["load"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    command = "python -m benchmarks.checkpoint " + " ".join(arguments)
    report.write(Path(config.out), command.strip(), report.machine("torch"), rows, mib=config.mib, ratios=ratios)
    report.bars(rows, Path(config.out), f"{config.mib} MiB on {RANKS} ranks, float32 matrices split by rows")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
