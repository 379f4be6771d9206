"""Measured step time of a small GPT on every grid, and the planner's predictions (4D paper, Fig. 7).

    python -m benchmarks planner [mbit=400] [repeats=5] [cluster=FILE] [measured=FILE] [out=benchmarks/results/planner]
    python -m benchmarks planner virtual=true [hosts=2] [ranks=4] [grids=4x1x2x1,2x2x2x1] [mbit=200] [repeats=3]

Calibrates the planner on an emulated cluster of two hosts with four ranks each, then measures all grids of eight
devices, alternating step by step. With ``virtual`` (``benchmarks.settings``) the planner is not calibrated: it
receives the rates of the links and of the devices. Of more than twenty grids, twelve are measured. Compares the times
of several grids with the orders that three cost models give: the planner's own, and the 4D paper's placement-aware and
placement-agnostic models.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.driver import print_rows
from benchmarks.interleave import contenders, interleave
from benchmarks.laboratory import paper_models
from benchmarks.settings import DeviceConfig, grid_name, parse_grids, plain_rates
from benchmarks.workloads import gpt_workload
from gpt4d.config import (
    Config,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    read_cluster,
)
from gpt4d.model import registry
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PlanEstimate

PACKAGES = ("torch",)
_GRIDS_PER_GROUP = 5  # a worker group holds a model and process groups for each of its grids
_COSTS = {"ours": "gpt4d", "aware": "placement-aware, Eq. 1-10", "agnostic": "placement-agnostic, Eq. 1-9"}
_NUM_FAST = 5  # the paper's "efficient" configurations
_MAX_MEASURED = 20  # grids; of more, the planner's first and as many spread over the rest are measured
_NUM_FIRST = 6


@dataclass
class Settings(DeviceConfig):
    grids: str | None = None  # grids to measure, separated by commas; null: all, or a selection of many
    cluster: str | None = None  # an existing calibration; null: calibrate first, or the rates of virtual devices
    measured: str | None = None  # the .json of an earlier run, to use its step times; null: measure
    out: str = "benchmarks/results/planner"


def rank_grids(path: Path, config: DeviceConfig) -> dict[str, list[PlanEstimate]]:
    """Return each cost model's plans, best first, for the training of ``peers`` on the cluster in the file ``path``."""
    model, batch, _ = gpt_workload(config)
    training = Config(
        model=model,
        train=TrainConfig(seq_len=model.max_positions, batch_size=batch),
        parallel=ParallelConfig(cache_layers="all", pipeline=PipelineConfig(stages=1)),
        cluster=read_cluster(path),
    )
    plans, description = rank(training, config.hosts * config.ranks).plans, registry.describe(model)

    def by_paper(aware: bool) -> list[PlanEstimate]:
        times = {p.sizes: paper_models.communication(training, description, p.sizes, aware) for p in plans}
        return sorted(plans, key=lambda plan: sum(times[plan.sizes].values()))

    return {"ours": plans, "aware": by_paper(True), "agnostic": by_paper(False)}


def plan_name(plan: PlanEstimate) -> str:
    """Return a plan's grid and settings as ``benchmarks.settings.parse_grids`` reads them."""
    return grid_name(plan.sizes, plan.choice)


def select_grids(order: list[str]) -> list[str]:
    """Return the grids to measure of the planner's ``order``: all, or its first and some spread over the rest."""
    if len(order) <= _MAX_MEASURED:
        return order
    rest = order[_NUM_FIRST:]
    return order[:_NUM_FIRST] + [rest[n * (len(rest) - 1) // (_NUM_FIRST - 1)] for n in range(_NUM_FIRST)]


def measure_grids(cluster: EmulatedCluster, names: Sequence[str], config: DeviceConfig) -> list[dict]:
    """Return one row per grid. Neighbors in ``names`` go to different worker groups, so all have a similar load."""
    groups = -(-len(names) // _GRIDS_PER_GROUP)
    shares = [config.worker_arguments(names[group::groups]) for group in range(groups)]
    specs = [contenders("ours", "training", share) for share in shares]
    return interleave(cluster, specs, config.repeats, config.warm_up)


def compare_order(plans: list[PlanEstimate], seconds: dict[str, float]) -> dict:
    """Return measures of how well the order of ``plans`` predicts the measured ``seconds`` of each grid."""
    order = [str(plan.sizes) for plan in plans]
    fastest = sorted(seconds, key=seconds.__getitem__)
    places = [order.index(name) for name in fastest]
    return {
        "order": order,
        "first_over_fastest": seconds[order[0]] / seconds[fastest[0]],
        "place_of_fastest": places[0] + 1,
        "fastest_among_first": len(set(fastest[:_NUM_FAST]) & set(order[:_NUM_FAST])),
        "spearman": statistics.correlation(range(len(order)), places),
    }


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with one panel per cost model: the measured times in its order of the grids."""
    from matplotlib.figure import Figure

    if not (comparisons := results["models"]):
        return None
    seconds = {row["name"].partition("/")[0]: row["median_s"] for row in report.counting(results["rows"])}
    predicted = results["predicted_s"]
    fast = sorted(seconds, key=seconds.__getitem__)[:_NUM_FAST]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(comparisons), sharey=True)
    for panel, (cost, comparison) in zip(panels, comparisons.items(), strict=True):
        order = comparison["order"]
        colors = ["#2ca02c" if name in fast else "#b7b7b7" for name in order]
        panel.bar(range(len(order)), [seconds[name] for name in order], color=colors)
        if cost == "ours":
            panel.plot(range(len(order)), [predicted[name] for name in order], "k_", markersize=9, label="predicted")
            panel.legend()
        panel.set_xticks(range(len(order)), order, rotation=90, fontsize=7)
        panel.set_title(f"{_COSTS[cost]}\nSpearman {comparison['spearman']:.2f}", fontsize=10)
    panels[0].set_ylabel("measured seconds per step")
    figure.supxlabel("grids in the order of each model (x, y, z, data); green: the five fastest", fontsize=9)
    return figure


def run(settings: Settings) -> Iterator[dict]:
    grids = settings.grids and parse_grids(settings.grids, settings.hosts * settings.ranks)
    with TemporaryDirectory() as directory, EmulatedCluster(settings) as cluster:
        path = Path(settings.cluster or f"{directory}/cluster.yaml")
        if not settings.cluster and settings.virtual:
            OmegaConf.save(plain_rates(settings), path)
        elif not settings.cluster:
            outputs = cluster.run([sys.executable, "-m", "gpt4d.planner.calibrate", f"out={path}"], timeout_s=1200)
            print(outputs[0], end="")
        plans, calibration = rank_grids(path, settings), path.read_text()
        if settings.measured:
            rows = json.loads(Path(settings.measured).read_text())["rows"]
        else:
            rows = measure_grids(cluster, grids or select_grids([plan_name(p) for p in plans["ours"]]), settings)
    print_rows(rows)
    seconds = {row["name"].partition("/")[0]: row["median_s"] for row in report.counting(rows)}
    plans = {cost: [plan for plan in ranked if str(plan.sizes) in seconds] for cost, ranked in plans.items()}
    comparisons = {cost: compare_order(plans[cost], seconds) for cost in _COSTS} if len(seconds) > 1 else {}
    predicted = {str(plan.sizes): plan.step_time_s for plan in plans["ours"]}
    errors = {name: predicted_s / seconds[name] - 1 for name, predicted_s in predicted.items()}
    for name, error in errors.items():
        print(f"{name}: predicted {predicted[name]:.3f} s, measured {seconds[name]:.3f} s, {error:+.0%}")
    for cost, comparison in comparisons.items():
        print(cost, {key: value for key, value in comparison.items() if key != "order"})
    yield {
        **settings.description(),
        "predicted_s": predicted,
        "prediction_error": errors,
        "models": comparisons,
        "calibration": calibration,
        "rows": rows,
    }
