"""Every grid of a small GPT for real, beside what the planner said of it (the 4D paper's Fig. 7).

    python -m benchmarks.planner [mbit=400] [repeats=5] [cluster=FILE] [measured=FILE] [out=docs/planner]

On an emulated cluster of two hosts of four ranks: the planner's calibration, then all grids of eight devices, which
take turns step by step. Their measured times are compared with the order of three models: the planner's own, and the
4D paper's placement-aware and placement-agnostic ones. Writes ``out``.json and ``out``.png.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import report
from benchmarks.cluster import Cluster, ClusterConfig
from benchmarks.interleave import Entry, interleave
from benchmarks.workers.training import BATCH, MODEL
from gpt4d.config import Config, ParallelConfig, TrainConfig, from_arguments, read_cluster
from gpt4d.planner.estimate import Plan
from gpt4d.planner.search import rank
from gpt4d.runtime.errors import one_line_errors

_HOSTS, _RANKS = 2, 4
_TOGETHER = 5  # grids that share a team of processes: each holds a model and its groups
_COSTS = {"ours": "gpt4d", "aware": "placement-aware, Eq. 1-10", "agnostic": "placement-agnostic, Eq. 1-9"}
_FAST = 5  # the paper's "efficient" configurations


@dataclass
class PlannerBenchmark:
    mbit: float = 400.0
    repeats: int = 5
    cluster: str | None = None  # a calibration made before; null: one is made
    measured: str | None = None  # the .json of an earlier run, whose step times are taken; null: they are measured
    out: str = "docs/planner"


def rankings(path: Path) -> dict[str, list[Plan]]:
    """What each model says, on the cluster of ``path``, of the training that the peers' benchmark does."""
    config = Config(
        model=MODEL,
        train=TrainConfig(seq_len=MODEL.max_positions, batch_size=BATCH),
        parallel=ParallelConfig(cache_layers="all"),
        cluster=read_cluster(path),
    )
    return {cost: rank(config, _HOSTS * _RANKS, cost=cost).plans for cost in _COSTS}


def step_times(cluster: Cluster, names: list[str], repeats: int) -> list[dict]:
    """A row for each grid. The best and the worst are spread over the teams: none has an easier time."""
    teams = -(-len(names) // _TOGETHER)
    shares = [tuple(names[team::teams]) for team in range(teams)]
    return interleave(cluster, [Entry("ours", "benchmarks.workers.train_ours", arguments=s) for s in shares], repeats)


def compared(plans: list[Plan], seconds: dict[str, float]) -> dict:
    """How well an order of grids foretells their measured ``seconds``."""
    order = [str(plan.sizes) for plan in plans]
    fastest = sorted(seconds, key=seconds.__getitem__)
    places = [order.index(name) for name in fastest]
    return {
        "order": order,
        "first_over_fastest": seconds[order[0]] / seconds[fastest[0]],
        "place_of_fastest": places[0] + 1,
        "fastest_among_first": len(set(fastest[:_FAST]) & set(order[:_FAST])),
        "spearman": statistics.correlation(range(len(order)), places),
    }


def errors(plans: list[Plan], seconds: dict[str, float]) -> dict[str, float]:
    """Predicted over measured step time, less 1, of each grid."""
    return {str(plan.sizes): plan.step_time_s / seconds[str(plan.sizes)] - 1 for plan in plans}


def plot(found: dict[str, dict], seconds: dict[str, float], predicted: dict[str, float], out: Path) -> None:
    from matplotlib.figure import Figure

    fast = sorted(seconds, key=seconds.__getitem__)[:_FAST]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for panel, (cost, comparison) in zip(panels, found.items(), strict=True):
        order = comparison["order"]
        colours = ["#2ca02c" if name in fast else "#b7b7b7" for name in order]
        panel.bar(range(len(order)), [seconds[name] for name in order], color=colours)
        if cost == "ours":
            panel.plot(range(len(order)), [predicted[name] for name in order], "k_", markersize=9, label="predicted")
            panel.legend()
        panel.set_xticks(range(len(order)), order, rotation=90, fontsize=7)
        panel.set_title(f"{_COSTS[cost]}\nSpearman {comparison['spearman']:.2f}", fontsize=10)
    panels[0].set_ylabel("measured seconds a step")
    figure.supxlabel("grids in the order of each model (x, y, z, data); green: the five fastest", fontsize=9)
    figure.savefig(out.with_suffix(".png"), dpi=120)


def main(arguments: list[str]) -> None:
    config = from_arguments(PlannerBenchmark, arguments)
    out = Path(config.out)
    with TemporaryDirectory() as here, Cluster(ClusterConfig(_HOSTS, _RANKS, config.mbit)) as cluster:
        path = Path(config.cluster or f"{here}/measured.yaml")
        if not config.cluster:
            told = cluster.run([sys.executable, "-m", "gpt4d.planner.calibrate", f"out={path}"], timeout_s=1200)
            print(told[0], end="")
        plans, calibration = rankings(path), path.read_text()
        if config.measured:
            rows = json.loads(Path(config.measured).read_text())["rows"]
        else:
            rows = step_times(cluster, [str(plan.sizes) for plan in plans["ours"]], config.repeats)
    seconds = {row["name"]: row["median_s"] for row in rows}
    found = {cost: compared(plans[cost], seconds) for cost in _COSTS}
    predicted = {str(plan.sizes): plan.step_time_s for plan in plans["ours"]}
    off = errors(plans["ours"], seconds)
    for plan in plans["ours"]:
        name = str(plan.sizes)
        print(f"{name}: predicted {predicted[name]:.3f} s, measured {seconds[name]:.3f} s, {off[name]:+.0%}")
    for cost, comparison in found.items():
        print(cost, {key: value for key, value in comparison.items() if key != "order"})
    command = "python -m benchmarks.planner " + " ".join(arguments)
    report.write(
        out,
        command.strip(),
        report.machine("torch"),
        rows,
        uplink_mbit_per_s=config.mbit,
        predicted_s=predicted,
        prediction_error=off,
        models=found,
        calibration=calibration,
    )
    plot(found, seconds, predicted, out)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
