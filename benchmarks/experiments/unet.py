"""Training step time of a U-Net on a virtual cluster: grids of gpt4d, predicted too, and torch's DDP and FSDP2.

    python -m benchmarks unet [grids=2x4x1x1,1x1x8x1] [hosts=2] [ranks=4] [mbit=50] [out=benchmarks/results/unet_grids]

Measures the entire step: forward, backward, gradient reduction and clipping, AdamW; float32, equal batches and weights.
torch trains diffusers' UNet2DModel. ``1x1x8x1`` is ZeRO-3 in gpt4d's layers. The planner receives the rates of the
links and of the devices (``benchmarks.settings``). On virtual devices values are meaningless, so losses are not
compared.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.driver import measure
from benchmarks.interleave import contenders
from benchmarks.settings import DeviceConfig, parse_grid, parse_grids, plain_rates
from benchmarks.workloads import UNET
from gpt4d.config import Config, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.planner.estimate import Estimate

PACKAGES = ("torch", "diffusers")


@dataclass
class Settings(DeviceConfig):
    grids: str = "2x4x1x1,1x1x8x1"  # grids of gpt4d, gx·gy·gz·gdata
    virtual: bool = True
    # A U-Net has many operations. With faster links and devices, the processor of this machine is the bottleneck.
    mbit: float = 50.0
    flops: float = 5e9
    warm_up: int = 1
    out: str = "benchmarks/results/unet_grids"


def predicted_s(settings: DeviceConfig, name: str) -> float:
    """Return the planner's seconds of a step on a grid with settings."""
    sizes, choice, _ = parse_grid(name)
    parallel = ParallelConfig(cache_layers="all", pipeline=PipelineConfig(stages=1), **choice)
    train = TrainConfig(seq_len=1, batch_size=UNET.batch)
    config = Config(model=UNET.model, train=train, parallel=parallel, cluster=plain_rates(settings))
    return Estimate(config, sizes).step(UNET.batch // sizes.batch_shards).step_time_s


def run(settings: Settings) -> Iterator[dict]:
    grids = parse_grids(settings.grids, settings.hosts * settings.ranks)
    ours = contenders("ours", "unet", settings.worker_arguments(grids))
    rows = measure(settings, [ours, contenders("torch", "unet", settings.worker_arguments(), needs="diffusers")])
    for row in rows:
        if row["family"] == "ours":
            row["predicted_s"] = predicted_s(settings, row["name"])
        predicted = f"  predicted {row['predicted_s']:.3f} s" if "predicted_s" in row else ""
        print(report.line(row) + predicted)
    yield {**settings.description(), "model": asdict(UNET.model), "batch": UNET.batch, "rows": rows}


def plot(settings: Settings, results: dict) -> Any:
    rows = sorted(report.counting(results["rows"]), key=lambda row: row["median_s"])
    size = UNET.model.image_size
    return report.bars(
        rows, f"A training step of a U-Net: {UNET.batch} images of {size}×{size}, {settings.mbit:g} Mbit/s"
    )
