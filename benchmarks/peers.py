"""A training step beside those of torch and megatron-core, on an emulated cluster.

    python -m benchmarks.peers [grids=4x1x1x2,2x2x1x2] [mbit=400] [repeats=5] [out=docs/peers]

A whole step of a GPT-2 on two hosts of four ranks: forward, backward, gradients summed and clipped, AdamW; float32, no
activation checkpointing. All start from the same weights and see the same tokens, so their losses agree, and all take
turns in one run, a few steps at a time. megatron-core takes part where it is installed. Writes the figures as
``out``.json and draws them as ``out``.png.
"""

import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import Cluster, ClusterConfig
from benchmarks.interleave import Entry, interleave
from benchmarks.workers.training import BATCH, MODEL
from gpt4d.config import ConfigError, GridSizes, from_arguments
from gpt4d.runtime.errors import one_line_errors

HOSTS, RANKS = 2, 4


@dataclass
class PeersBenchmark:
    grids: str = "4x1x2x1,2x2x2x1,4x1x1x2,4x1x1x2/sharded,2x2x1x2,2x1x1x4,1x1x1x8"  # gx·gy·gz·gdata of ours
    mbit: float = 400.0
    repeats: int = 5
    out: str = "docs/peers"


def grids_of(text: str) -> tuple[str, ...]:
    """The grids of a list such as ``4x1x1x2,2x2x1x2``. ConfigError for one that is not of all ranks."""
    grids = tuple(text.split(","))
    for grid in grids:
        sizes = re.fullmatch(r"(\d+(?:x\d+){3})(/sharded)?", grid)
        if not sizes or GridSizes(*map(int, sizes[1].split("x"))).devices != HOSTS * RANKS:
            raise ConfigError(
                f"grids={grid}: a grid is gx·gy·gz·gdata of {HOSTS * RANKS} ranks, such as 2x2x1x2 or 4x1x1x2/sharded"
            )
    return grids


def main(arguments: list[str]) -> None:
    config = from_arguments(PeersBenchmark, arguments)
    teams = [
        Entry("ours", "benchmarks.workers.train_ours", arguments=grids_of(config.grids)),
        Entry("torch", "benchmarks.workers.train_torch"),
        Entry("megatron-core", "benchmarks.workers.train_megatron", needs="megatron"),
    ]
    with Cluster(ClusterConfig(HOSTS, RANKS, config.mbit)) as cluster:
        rows = interleave(cluster, teams, config.repeats, warm_up=1)
    for row in rows:
        print(report.line(row))
    out, command = Path(config.out), "python -m benchmarks.peers " + " ".join(arguments)
    settings = {"uplink_mbit_per_s": config.mbit, "model": asdict(MODEL), "batch": BATCH}
    report.write(out, command.strip(), report.machine("torch", "megatron-core"), rows, **settings)
    title = f"A training step: {MODEL.layers} layers of {MODEL.hidden}, batch {BATCH} × {MODEL.max_positions}"
    report.bars(sorted(rows, key=lambda row: row["median_s"]), out, f"{title}, {config.mbit:g} Mbit/s uplinks")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
