"""What each overlap saves (the 4D paper's Fig. 3), on an emulated cluster.

    python -m benchmarks.overlap [mbit=400] [repeats=5] [out=docs/overlap]

Transformer blocks on a 2×2×2 grid of two hosts of four ranks, with full activation checkpointing, forward and
backward, in float32. The settings take turns in one run, step by step: a machine that drifts drifts for all alike.
Writes the figures as ``out``.json and draws them as ``out``.png.
"""

import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cluster import Cluster, ClusterConfig
from gpt4d.config import GridSizes, ModelConfig, OverlapConfig, from_arguments
from gpt4d.errors import one_line_errors
from gpt4d.model.gpt import GPT
from gpt4d.model.init import initialise
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.launch import Launch, process_group
from gpt4d.parallel.weights import WeightStream

SIZES = GridSizes(2, 2, 2, 1)
BATCH, LENGTH = 8, 128
LAYERS, HIDDEN = 4, 512
# name: (all-reduce, reduce-scatter, all-gather, blocks cached), one more at a time as in the paper's figure
SETTINGS = {
    "none": (False, False, False, 0),
    "+OAR": (True, False, False, 0),
    "+ORS": (True, True, False, 0),
    "+OAG": (True, True, True, 0),
    "+cache": (True, True, True, LAYERS),
}


@dataclass
class OverlapBenchmark:
    mbit: float = 400.0
    repeats: int = 5
    out: str = "docs/overlap"


class Contender:
    """The blocks under one setting, and the seconds of each of their steps on this rank."""

    def __init__(self, grid: Grid, all_reduce: bool, reduce_scatter: bool, all_gather: bool, cached: int):
        overlap = OverlapConfig(all_reduce, reduce_scatter, all_gather)
        self.weights = WeightStream(grid, overlap=overlap)
        # The rest of the model is built but takes no part: the vocabulary is as small as it may be.
        config = ModelConfig("blocks", LAYERS, HIDDEN, 8, vocab_size=8, vocab_multiple=8, max_positions=LENGTH)
        self.model = GPT(config, self.weights, recompute=True, cache_layers=cached)
        initialise(self.model, 0, grid)
        self.seconds, self.exposed = [], []

    def step(self, measured: bool) -> None:
        grid = self.weights.grid
        shape = (BATCH // SIZES.batch_shards, LENGTH, HIDDEN // SIZES.y)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        numbers = torch.arange(shape[0])
        dist.barrier()
        for axis in grid:
            axis.traffic.read()
        start = time.perf_counter()
        out = self.model.through_blocks(x, numbers)
        out.backward(torch.ones_like(out))
        self.weights.finish()
        dist.barrier()  # the step of the slowest rank
        if measured:
            self.seconds.append(time.perf_counter() - start)
            self.exposed.append({axis.name: axis.traffic.read()["exposed_s"] for axis in (grid.x, grid.y, grid.z)})
        self.model.zero_grad(set_to_none=True)


def rank_main(repeats: int) -> None:
    launch = Launch.from_environment()
    with process_group(launch, torch.device("cpu")):
        grid = Grid(SIZES)
        contenders = {name: Contender(grid, *setting) for name, setting in SETTINGS.items()}
        for turn in range(-2, repeats):  # two turns to learn the order of the weights and to warm up
            for contender in contenders.values():
                contender.step(measured=turn >= 0)
        if launch.rank == 0:
            found = {name: {"seconds": c.seconds, "exposed_s": c.exposed} for name, c in contenders.items()}
            print(json.dumps(found))


def summary(found: dict) -> list[dict]:
    """A row for each setting: the median step and its spread, and the median wait for each axis."""
    rows = []
    for name, runs in found.items():
        seconds = runs["seconds"]
        row = {"setting": name, "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        row["exposed_s"] = {a: statistics.median(run[a] for run in runs["exposed_s"]) for a in ("x", "y", "z")}
        rows.append(row)
    return rows


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [row["setting"] for row in rows]
    bottom = [row["median_s"] - sum(row["exposed_s"].values()) for row in rows]
    axes.bar(names, bottom, color="#9aa5b1", label="computing, and what is hidden behind it")
    for axis, colour in zip(("x", "y", "z"), ("#1f77b4", "#2ca02c", "#d62728"), strict=True):
        heights = [row["exposed_s"][axis] for row in rows]
        axes.bar(names, heights, bottom=bottom, color=colour, label=f"waiting for {axis}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    spread = [[row["median_s"] - row["min_s"] for row in rows], [row["max_s"] - row["median_s"] for row in rows]]
    axes.errorbar(names, bottom, yerr=spread, fmt="none", ecolor="black", capsize=4)
    axes.set_ylabel("seconds a step (median, min–max)")
    axes.set_title(f"{LAYERS} blocks of {HIDDEN}, grid {SIZES}, activation checkpointing")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> None:
    config = from_arguments(OverlapBenchmark, arguments)
    with Cluster(ClusterConfig(hosts=2, ranks=4, mbit=config.mbit)) as cluster:
        output = cluster.run([sys.executable, "-m", "benchmarks.overlap", f"rank={config.repeats}"])
    rows = summary(json.loads(output[0]))
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores shared by 8 ranks, torch {torch.__version__}"
    document = {"machine": machine, "uplink_mbit_per_s": config.mbit, "repeats": config.repeats, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    plot(rows, out.with_suffix(".png"))
    for row in rows:
        exposed = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in row["exposed_s"].items())
        print(f"{row['setting']:7} {row['median_s']:.2f} s ({row['min_s']:.2f}–{row['max_s']:.2f})  exposed: {exposed}")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("rank="):
        rank_main(int(sys.argv[1].removeprefix("rank=")))
    else:
        with one_line_errors():
            main(sys.argv[1:])
