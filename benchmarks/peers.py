"""Training step time of gpt4d, torch and megatron-core on an emulated cluster.

    python -m benchmarks.peers [grids=4x1x1x2,2x2x1x2] [mbit=400] [repeats=5] [virtual=true]
        [out=benchmarks/results/peers]

Measures the whole step of a GPT-2 on two hosts with four ranks each: forward, backward, gradient reduction and
clipping, AdamW; float32, no activation checkpointing. All contenders start from the same weights and use the same
tokens, so their losses agree. They alternate in one run, a few steps at a time. megatron-core takes part if it is
installed. Writes the figures to ``out``.json and draws them in ``out``.png. ``benchmarks.settings`` explains
``virtual`` and its settings; on virtual devices values are meaningless, so losses are not compared.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import DeviceConfig, parse_grids, read_arguments
from benchmarks.workers.training import workload
from gpt4d.runtime.errors import one_line_errors


@dataclass
class PeersBenchmark(DeviceConfig):
    # Our grids, gx·gy·gz·gdata.
    grids: str = "4x1x2x1,2x2x2x1,1x1x8x1,1x1x8x1/replicated=1,4x1x1x2,4x1x1x2/sharded,2x2x1x2,2x1x1x4,1x1x1x8"
    warm_up: int = 1  # each turn is several steps
    out: str = "benchmarks/results/peers"


def main(arguments: list[str]) -> None:
    config = read_arguments(PeersBenchmark, arguments)
    grids, (model, batch, _) = parse_grids(config.grids, config.hosts * config.ranks), workload(config.virtual)
    specs = [
        WorkerSpec("ours", "benchmarks.workers.train_ours", arguments=config.worker_arguments(grids)),
        WorkerSpec("torch", "benchmarks.workers.train_torch", arguments=config.worker_arguments()),
        WorkerSpec("megatron-core", "benchmarks.workers.train_megatron", "megatron", config.worker_arguments()),
    ]
    with EmulatedCluster(config) as cluster:
        rows = interleave(cluster, specs, config.repeats, config.warm_up)
    for row in rows:
        print(report.line(row))
    out, command = Path(config.out), "python -m benchmarks.peers " + " ".join(arguments)
    settings = {**config.description(), "model": asdict(model), "batch": batch}
    report.write(out, command.strip(), report.machine("torch", "megatron-core"), rows, **settings)
    title = f"A training step: {model.layers} layers of {model.hidden}, batch {batch} × {model.max_positions}"
    rows = sorted(report.counting(rows), key=lambda row: row["median_s"])
    report.bars(rows, out, f"{title}, {config.mbit:g} Mbit/s uplinks")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
