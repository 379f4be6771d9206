"""Time of Muon's updates on an emulated cluster, compared with Megatron's scheme ``duplicated``.

    python -m benchmarks muon [grids=1x1x1x8/sharded,4x1x2x1] [mbit=200] [repeats=5] [out=benchmarks/results/muon]

Measures the entire step of a GPT-2 on two hosts with four virtual devices each, with three optimizers: AdamW, Muon, and
Muon whose ranks gather and orthogonalize every matrix (``duplicated``). On each grid the optimizers alternate, one step
at a time. The time of an update is the difference between a step and AdamW's step. ``benchmarks.settings`` explains the
settings.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.driver import measure, print_rows
from benchmarks.interleave import WorkerSpec
from benchmarks.settings import DeviceConfig, parse_grids
from benchmarks.workloads import gpt_workload

PACKAGES = ("torch",)
_ADAPTER = "benchmarks.adapters.gpt4d_muon"
_COLORS = {"AdamW's step": "#b7b7b7", "update by Muon": "#7a9cc6", "waiting in this update": "#d62728"}


@dataclass
class Settings(DeviceConfig):
    grids: str = "1x1x1x8/sharded,4x1x2x1,2x2x2x1,1x1x1x8"  # gx·gy·gz·gdata
    mbit: float = 200.0
    virtual: bool = True
    warm_up: int = 1
    out: str = "benchmarks/results/muon"


def run(settings: Settings) -> Iterator[dict]:
    grids, work = parse_grids(settings.grids, settings.hosts * settings.ranks), gpt_workload(settings)
    worker = WorkerSpec("ours", "benchmarks.adapters.gpt4d_muon", "updates", "torch", settings.worker_arguments(grids))
    rows: list[dict] = []
    updates: dict[str, dict[str, float]] = {}
    for grid in grids:
        worker = WorkerSpec("ours", _ADAPTER, "updates", "torch", settings.worker_arguments([grid]))
        measured = measure(settings, [worker])
        print_rows(measured)
        rows += measured
        if len(report.counting(measured)) == len(measured):
            updates[grid] = update(grid, rows)
            print(", ".join(f"{name} {value:.3f}" for name, value in updates[grid].items()), flush=True)
        sizes = {"model": asdict(work.model), "batch": work.batch}
        yield {**settings.description(), **sizes, "updates": updates, "rows": rows}


def update(grid: str, rows: list[dict]) -> dict[str, float]:
    """Return seconds of both updates, their ratio, both shares of a step, and the share of Muon's step that waits."""
    adamw, muon, duplicated = (_row(grid, variant, rows) for variant in ("adamw", "muon", "duplicated"))
    seconds = {name: row["median_s"] - adamw["median_s"] for name, row in (("muon", muon), ("duplicated", duplicated))}
    return {
        "muon_s": seconds["muon"],
        "duplicated_s": seconds["duplicated"],
        "ratio": seconds["muon"] / seconds["duplicated"],
        "muon_share": seconds["muon"] / muon["median_s"],
        "duplicated_share": seconds["duplicated"] / duplicated["median_s"],
        "exposed_share": sum(muon["update_exposed_s"].values()) / muon["median_s"],
    }


def _row(grid: str, variant: str, rows: list[dict]) -> dict:
    return next(row for row in rows if row["name"] == f"{grid} {variant}")


def plot(settings: Settings, results: dict) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = report.counting(results["rows"])
    rows = [row for row in rows if row["name"].rpartition(" ")[0] in results["updates"]]
    figure = Figure(figsize=(9, 1.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        base = _row(row["name"].rpartition(" ")[0], "adamw", rows)["median_s"]
        waiting = sum(row["update_exposed_s"].values())
        start = 0.0
        for seconds, color in zip((base, row["median_s"] - base - waiting, waiting), _COLORS.values(), strict=True):
            axes.barh(place, max(0.0, seconds), left=start, color=color)
            start += seconds
        spread = [[row["median_s"] - row["min_s"]], [row["max_s"] - row["median_s"]]]
        axes.errorbar(row["median_s"], place, xerr=spread, fmt="none", ecolor="black", capsize=3)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("seconds (median, min–max)")
    model = results["model"]
    axes.set_title(f"A training step: {model['layers']} layers of {model['hidden']}, {settings.mbit:g} Mbit/s uplinks")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in _COLORS.items()], loc="outside lower center", ncols=3
    )
    return figure
