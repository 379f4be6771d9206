"""Training step time of a U-Net on a virtual cluster: our grids, predicted too, and torch's DDP and FSDP2.

    python -m benchmarks.unet [grids=2x4x1x1,1x1x8x1] [hosts=2] [ranks=4] [mbit=50] [out=benchmarks/results/unet_grids]

Measures the whole step: forward, backward, gradient reduction and clipping, AdamW; float32, equal batches and weights.
torch trains diffusers' UNet2DModel. ``1x1x8x1`` is ZeRO-3 in our layers. The planner is given the rates of the links
and of the devices (``benchmarks.settings``). On virtual devices values are meaningless, so losses are not compared.
Writes ``out``.json and ``out``.png.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.planner import plain_rates
from benchmarks.settings import DeviceConfig, parse_grid, parse_grids, read_arguments
from benchmarks.workers.unets import BATCH, MODEL
from gpt4d.config import Config, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.planner.estimate import Estimate
from gpt4d.runtime.errors import one_line_errors


@dataclass
class UNetBenchmark(DeviceConfig):
    grids: str = "2x4x1x1,1x1x8x1"  # ours, gx·gy·gz·gdata
    out: str = "benchmarks/results/unet_grids"


# With faster links and devices, the processor of this machine would be the bottleneck: a U-Net has many operations.
_DEFAULTS = ("virtual=true", "mbit=50", "flops=5e9", "repeats=5")


def predicted_s(config: DeviceConfig, name: str) -> float:
    """Return the planner's seconds of a step on a grid with settings."""
    sizes, choice, _ = parse_grid(name)
    parallel = ParallelConfig(cache_layers="all", pipeline=PipelineConfig(stages=1))
    train = TrainConfig(seq_len=1, batch_size=BATCH)
    settings = Config(model=MODEL, train=train, parallel=parallel, cluster=plain_rates(config))
    return Estimate(settings, sizes, choice=choice).plan(BATCH // sizes.batch_shards).step_time_s


def main(arguments: list[str]) -> None:
    config = read_arguments(UNetBenchmark, [*_DEFAULTS, f"out={UNetBenchmark.out}", *arguments])
    grids = parse_grids(config.grids, config.hosts * config.ranks)
    specs = [
        WorkerSpec("ours", "benchmarks.workers.unet_ours", arguments=config.worker_arguments(grids)),
        WorkerSpec("torch", "benchmarks.workers.unet_torch", "diffusers", arguments=config.worker_arguments()),
    ]
    with EmulatedCluster(config) as cluster:
        rows = interleave(cluster, specs, config.repeats, config.warm_up)
    for row in rows:
        if row["family"] == "ours":
            row["predicted_s"] = predicted_s(config, row["name"])
        predicted = f"  predicted {row['predicted_s']:.3f} s" if "predicted_s" in row else ""
        print(report.line(row) + predicted)
    out, command = Path(config.out), "python -m benchmarks.unet " + " ".join(arguments)
    settings = {**config.description(), "model": asdict(MODEL), "batch": BATCH}
    report.write(out, command.strip(), report.machine("torch", "diffusers"), rows, **settings)
    rows = sorted(report.counting(rows), key=lambda row: row["median_s"])
    size = MODEL.image_size
    report.bars(rows, out, f"A training step of a U-Net: {BATCH} pictures of {size} × {size}, {config.mbit:g} Mbit/s")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
