"""Training step time of gpt4d, torch and megatron-core on an emulated cluster.

    python -m benchmarks peers [grids=4x1x1x2,2x2x1x2] [mbit=400] [repeats=5] [virtual=true]
        [out=benchmarks/results/peers]

Measures the entire step of a GPT-2 on two hosts with four ranks each: forward, backward, gradient reduction and
clipping, AdamW; float32, no activation checkpointing. All contenders start from the same weights and use the same
tokens, so their losses agree. They alternate in one run, a few steps at a time. megatron-core takes part if it is
installed. ``benchmarks.settings`` explains ``virtual`` and its settings; on virtual devices values are meaningless, so
losses are not compared.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.driver import measure, print_rows
from benchmarks.interleave import contenders
from benchmarks.settings import DeviceConfig, parse_grids
from benchmarks.workloads import gpt_workload

PACKAGES = ("torch", "megatron-core")


@dataclass
class Settings(DeviceConfig):
    # Grids of gpt4d, gx·gy·gz·gdata.
    grids: str = "4x1x2x1,2x2x2x1,1x1x8x1,1x1x8x1/replicated=1,4x1x1x2,4x1x1x2/sharded,2x2x1x2,2x1x1x4,1x1x1x8"
    warm_up: int = 1  # each run is several steps
    out: str = "benchmarks/results/peers"


def run(settings: Settings) -> Iterator[dict]:
    grids, work = parse_grids(settings.grids, settings.hosts * settings.ranks), gpt_workload(settings)
    specs = [contenders("ours", "training", settings.worker_arguments(grids))]
    specs += [contenders(name, "training", settings.worker_arguments()) for name in ("torch", "megatron-core")]
    rows = measure(settings, specs)
    print_rows(rows)
    yield {**settings.description(), "model": asdict(work.model), "batch": work.batch, "rows": rows}


def plot(settings: Settings, results: dict) -> Any:
    (model, batch, _), rows = gpt_workload(settings), report.counting(results["rows"])
    title = f"A training step: {model.layers} layers of {model.hidden}, batch {batch} × {model.max_positions}"
    rows = sorted(rows, key=lambda row: row["median_s"])
    return report.bars(rows, f"{title}, {settings.mbit:g} Mbit/s uplinks")
