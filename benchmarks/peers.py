"""Training step time of gpt4d, torch and megatron-core on an emulated cluster.

    python -m benchmarks.peers [grids=4x1x1x2,2x2x1x2] [mbit=400] [repeats=5] [out=docs/peers]

Measures the whole step of a GPT-2 on two hosts with four ranks each: forward, backward, gradient reduction and
clipping, AdamW; float32, no activation checkpointing. All contenders start from the same weights and use the same
tokens, so their losses agree. They alternate in one run, a few steps at a time. megatron-core takes part if it is
installed. Writes the figures to ``out``.json and draws them in ``out``.png.
"""

import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster, EmulatedClusterConfig
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.workers.training import BATCH, MODEL
from gpt4d.config import ConfigError, GridSizes, from_arguments
from gpt4d.runtime.errors import one_line_errors

HOSTS, RANKS = 2, 4


@dataclass
class PeersBenchmark:
    grids: str = "4x1x2x1,2x2x2x1,4x1x1x2,4x1x1x2/sharded,2x2x1x2,2x1x1x4,1x1x1x8"  # our grids, gx·gy·gz·gdata
    mbit: float = 400.0
    repeats: int = 5
    out: str = "docs/peers"


def parse_grids(text: str) -> tuple[str, ...]:
    """Split a list of grids such as ``4x1x1x2,2x2x1x2``. Raises ConfigError if one does not use all ranks."""
    grids = tuple(text.split(","))
    for grid in grids:
        sizes = re.fullmatch(r"(\d+(?:x\d+){3})(/sharded)?", grid)
        if not sizes or GridSizes(*map(int, sizes[1].split("x"))).devices != HOSTS * RANKS:
            raise ConfigError(
                f"grids={grid}: not a grid gx·gy·gz·gdata of {HOSTS * RANKS} ranks; "
                "use grids such as 2x2x1x2 or 4x1x1x2/sharded"
            )
    return grids


def main(arguments: list[str]) -> None:
    config = from_arguments(PeersBenchmark, arguments)
    specs = [
        WorkerSpec("ours", "benchmarks.workers.train_ours", arguments=parse_grids(config.grids)),
        WorkerSpec("torch", "benchmarks.workers.train_torch"),
        WorkerSpec("megatron-core", "benchmarks.workers.train_megatron", needs="megatron"),
    ]
    with EmulatedCluster(EmulatedClusterConfig(HOSTS, RANKS, config.mbit)) as cluster:
        rows = interleave(cluster, specs, config.repeats, warm_up=1)
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
