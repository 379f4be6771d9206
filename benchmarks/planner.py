"""Measured step time of a small GPT on every grid, and the planner's predictions (4D paper, Fig. 7).

    python -m benchmarks.planner [mbit=400] [repeats=5] [cluster=FILE] [measured=FILE] [out=benchmarks/results/planner]
    python -m benchmarks.planner virtual=true [hosts=2] [ranks=4] [grids=4x1x2x1,2x2x2x1] [mbit=200] [repeats=3]

Calibrates the planner on an emulated cluster of two hosts with four ranks each, then measures all grids of eight
devices, alternating step by step. With ``virtual`` (``benchmarks.settings``) the planner is not calibrated: it is given
the rates of the links and of the devices. Of more than twenty grids, twelve are measured. Compares the times of several
grids with the orders that three cost models give: the planner's own, and the 4D paper's placement-aware and
placement-agnostic ones. Writes ``out``.json and ``out``.png.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import OmegaConf

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import DeviceConfig, grid_name, parse_grids, read_arguments
from benchmarks.workers.training import workload
from gpt4d.config import (
    ClusterConfig,
    Config,
    LevelConfig,
    MeasuredConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    divisors,
    read_cluster,
)
from gpt4d.planner.device import KINDS
from gpt4d.planner.estimate import Plan
from gpt4d.planner.search import rank
from gpt4d.runtime.errors import one_line_errors

_GRIDS_PER_GROUP = 5  # a worker group holds a model and process groups for each of its grids
_COSTS = {"ours": "gpt4d", "aware": "placement-aware, Eq. 1-10", "agnostic": "placement-agnostic, Eq. 1-9"}
_NUM_FAST = 5  # the paper's "efficient" configurations
_MAX_MEASURED = 20  # grids; of more, the planner's first and as many spread over the rest are measured
_NUM_FIRST = 6


@dataclass
class PlannerBenchmark(DeviceConfig):
    grids: str | None = None  # to measure, separated by commas; null: all, or a selection of many
    cluster: str | None = None  # an existing calibration; null: calibrate first, or the rates of virtual devices
    measured: str | None = None  # the .json of an earlier run, to use its step times; null: measure
    out: str = "benchmarks/results/planner"


def plain_rates(config: DeviceConfig) -> ClusterConfig:
    """Return the emulated cluster with virtual devices as the planner's machine, with the rates that it is given."""
    intra_host_gb_s = config.intra_host_mb_s / 1000 if config.intra_host_mb_s else math.inf
    # On this machine's cores, ranks of a host copy and add up themselves; virtual devices have links that do it.
    inside = [
        MeasuredConfig(kind, local, nodes=1, sharing=1, latency_us=0.0, gb_s=intra_host_gb_s)
        for kind in KINDS
        for local in divisors(config.ranks)[1:]
    ]
    return ClusterConfig(
        name="virtual",
        matmul_tflops=config.flops / 1e12,
        memory_gb_s=config.memory_gb_s,
        operation_us=config.launch_us,
        hidden=1.0,
        levels=[LevelConfig(config.hosts, config.mbit / 8000), LevelConfig(config.ranks, intra_host_gb_s)],
        measured=inside,
    )


def rank_grids(path: Path, config: DeviceConfig) -> dict[str, list[Plan]]:
    """Return each cost model's plans, best first, for the training of ``peers`` on the cluster in the file ``path``."""
    model, batch, _ = workload(config.virtual)
    training = Config(
        model=model,
        train=TrainConfig(seq_len=model.max_positions, batch_size=batch),
        parallel=ParallelConfig(cache_layers="all", pipeline=PipelineConfig(stages=1)),
        cluster=read_cluster(path),
    )
    return {cost: rank(training, config.hosts * config.ranks, cost=cost).plans for cost in _COSTS}


def plan_name(plan: Plan) -> str:
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
    specs = [WorkerSpec("ours", "benchmarks.workers.train_ours", arguments=share) for share in shares]
    return interleave(cluster, specs, config.repeats, config.warm_up)


def compare_order(plans: list[Plan], seconds: dict[str, float]) -> dict:
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


def relative_errors(plans: list[Plan], seconds: dict[str, float]) -> dict[str, float]:
    """Return the relative error of each grid's predicted step time: predicted / measured - 1."""
    return {str(plan.sizes): plan.step_time_s / seconds[str(plan.sizes)] - 1 for plan in plans}


def plot(comparisons: dict[str, dict], seconds: dict[str, float], predicted: dict[str, float], out: Path) -> None:
    """Draw ``out``.png: one panel per cost model with the measured times in its order of the grids."""
    from matplotlib.figure import Figure

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
    figure.savefig(out.with_suffix(".png"), dpi=120)


def main(arguments: list[str]) -> None:
    config = read_arguments(PlannerBenchmark, arguments)
    grids = config.grids and parse_grids(config.grids, config.hosts * config.ranks)
    out = Path(config.out)
    with TemporaryDirectory() as directory, EmulatedCluster(config) as cluster:
        path = Path(config.cluster or f"{directory}/cluster.yaml")
        if not config.cluster and config.virtual:
            OmegaConf.save(plain_rates(config), path)
        elif not config.cluster:
            outputs = cluster.run([sys.executable, "-m", "gpt4d.planner.calibrate", f"out={path}"], timeout_s=1200)
            print(outputs[0], end="")
        plans, calibration = rank_grids(path, config), path.read_text()
        if config.measured:
            rows = json.loads(Path(config.measured).read_text())["rows"]
        else:
            rows = measure_grids(cluster, grids or select_grids([plan_name(p) for p in plans["ours"]]), config)
    for row in rows:
        print(report.line(row))
    seconds = {row["name"].partition("/")[0]: row["median_s"] for row in report.counting(rows)}
    plans = {cost: [plan for plan in ranked if str(plan.sizes) in seconds] for cost, ranked in plans.items()}
    comparisons = {cost: compare_order(plans[cost], seconds) for cost in _COSTS} if len(seconds) > 1 else {}
    predicted = {str(plan.sizes): plan.step_time_s for plan in plans["ours"]}
    errors = relative_errors(plans["ours"], seconds)
    for plan in plans["ours"]:
        name = str(plan.sizes)
        print(f"{name}: predicted {predicted[name]:.3f} s, measured {seconds[name]:.3f} s, {errors[name]:+.0%}")
    for cost, comparison in comparisons.items():
        print(cost, {key: value for key, value in comparison.items() if key != "order"})
    command = "python -m benchmarks.planner " + " ".join(arguments)
    report.write(
        out,
        command.strip(),
        report.machine("torch"),
        rows,
        **config.description(),
        predicted_s=predicted,
        prediction_error=errors,
        models=comparisons,
        calibration=calibration,
    )
    if comparisons:
        plot(comparisons, seconds, predicted, out)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
