"""ATP on virtual clusters of several topologies: every mesh with and without chunks, measured and predicted.

    python -m benchmarks atp [cases=1x8:5:50,8x1:16:50,2x4:16:100] [chunks=4] [mbit=200] [continued=true]
        [out=benchmarks/results/atp]

A case is hosts x ranks, the percentage of computation in a step, and optionally a rate of the uplinks in place of
``mbit``. The percentage is the share on DeviceMesh(N, 1) without chunks, and the rate of the virtual devices
(``benchmarks.settings``) follows from it. The ATP paper's Table 3 implies 4 to 6 % on its slow machines and 15 to 18 %
on InfiniBand. The planner receives the rates of links and devices, and chooses the order of ranks.

The two meshes that it expects to be fastest also run with ``chunks``. The fastest mesh also runs without any overlap of
all-reduces and computation, including the products of weight gradients. ``continued=true`` measures missing cases.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.driver import print_rows
from benchmarks.experiments.planner import measure_grids
from benchmarks.settings import DeviceConfig, grid_name, plain_rates
from benchmarks.workloads import gpt_workload
from gpt4d.config import Config, ConfigError, GridSizes, ParallelConfig, TrainConfig
from gpt4d.planner import atp
from gpt4d.planner.options import levels
from gpt4d.planner.stages import PlanEstimate

PACKAGES = ("torch",)
_NUM_CUT = 2  # meshes that also run with chunks


@dataclass
class Settings(DeviceConfig):
    cases: str = "1x8:5:50,8x1:5:50,8x1:16:50,2x4:16:100,4x4:16:50,16x1:16:50"
    chunks: int = 4  # compared with none
    continued: bool = False  # keep the cases that ``out``.json has: an earlier run was interrupted
    out: str = "benchmarks/results/atp"
    virtual: bool = True
    # Nothing overlaps with the next step, so a run is one step. With faster links or larger batches, the processor of
    # this machine is the bottleneck in some cases.
    mbit: float = 200.0
    sequences: int | None = 4
    layers: int | None = 2
    steps: int | None = 1
    warm_up: int = 1


@dataclass(frozen=True)
class Case:
    """A topology, the share of a step that is computation on DeviceMesh(N, 1), and the rate of the uplinks."""

    hosts: int
    ranks: int
    share: float
    mbit: float

    def __str__(self) -> str:
        return f"{self.hosts} host{'s' * (self.hosts > 1)} × {self.ranks}, {self.share:.0%} computation"


def parse_cases(text: str, mbit: float) -> list[Case]:
    """Return the cases of a list such as ``8x1:16,2x4:5:100``. Raises ConfigError for another text."""
    try:
        parts = [[*case.replace("x", ":").split(":"), mbit][:4] for case in text.split(",")]
        cases = [Case(int(hosts), int(ranks), float(share) / 100, float(rate)) for hosts, ranks, share, rate in parts]
    except ValueError:
        cases = []
    if not cases or not all(0 < case.share < 1 and case.hosts * case.ranks > 1 and case.mbit > 0 for case in cases):
        raise ConfigError(f"cases={text}: not a list of hosts x ranks: percentage; use 8x1:16,2x4:5:100, for example")
    return cases


def predict(config: DeviceConfig, mesh: atp.AtpMesh, chunks: int) -> PlanEstimate:
    """Return the planner's prediction for a mesh in the faster order of ranks."""
    model, batch, _ = gpt_workload(config)
    settings = Config(
        model=model,
        train=TrainConfig(seq_len=model.max_positions, batch_size=batch),
        parallel=ParallelConfig(cache_layers="all"),
        cluster=plain_rates(config),
    )
    orders = ["xy", "yx"] if 1 not in mesh else ["xy"]
    level = levels(settings)[0]
    steps = [level.choosing(rank_order=order, chunks=chunks).step((GridSizes(*mesh),), 1) for order in orders]
    return min(steps, key=lambda step: step.step_time_s)


def with_share(config: Settings, case: Case) -> Settings:
    """Return the settings of a case, with the rate of devices that gives its share of computation."""
    config = replace(config, hosts=case.hosts, ranks=case.ranks, mbit=case.mbit)
    plan = predict(config, atp.AtpMesh(case.hosts * case.ranks, 1), chunks=1)
    compute_s = case.share / (1 - case.share) * (plan.step_time_s - plan.slowest.compute_s)
    return replace(config, flops=config.flops * plan.slowest.compute_s / compute_s)


def compare(meshes: Sequence[str], first: str | None, seconds: dict[str, float], predicted: dict[str, float]) -> dict:
    """Return how good the planner's mesh is, and gains over ``first``, which is DeviceMesh(N, 1).

    Meshes that are not in ``seconds`` are left out: none of their runs counted.
    """
    counted = [mesh for mesh in meshes if mesh in seconds]
    if not counted:
        return {}
    best, chosen = min(counted, key=seconds.__getitem__), min(counted, key=predicted.__getitem__)
    comparison = {"best": best, "chosen": chosen, "chosen_over_best": seconds[chosen] / seconds[best]}
    if first is not None and first in seconds:
        comparison["gain"] = seconds[first] / seconds[best] - 1
        comparison["predicted_gain"] = predicted[first] / predicted[best] - 1
    return comparison


def gains_of_chunks(waiting: str, comparisons: dict[int, dict], seconds: dict[str, float]) -> dict[str, float]:
    """Return the gain of chunks over the best mesh without them, and over ``waiting``, a mesh without any overlap."""
    best = {count: seconds[comparison["best"]] for count, comparison in comparisons.items() if comparison}
    if len(best) < len(comparisons):
        return {}
    whole, cut = best.values()
    gains = {"gain": whole / cut - 1}
    return gains | ({"gain_over_waiting_sums": seconds[waiting] / cut - 1} if waiting in seconds else {})


def run_case(config: Settings, case: Case) -> dict:
    """Measure every mesh of a case and return rows, predictions and comparisons."""
    config = with_share(config, case)
    meshes = atp.meshes(case.hosts * case.ranks)
    plans = {(1, mesh): predict(config, mesh, chunks=1) for mesh in meshes}
    cut = {(config.chunks, mesh): predict(config, mesh, config.chunks) for mesh in meshes}
    plans |= dict(sorted(cut.items(), key=lambda item: item[1].step_time_s)[:_NUM_CUT])
    names = {key: grid_name(plan.sizes, plan.choice) for key, plan in plans.items()}
    plain = [key for key in names if key[0] == 1]
    waiting = names[min(plain, key=lambda key: plans[key].step_time_s)] + "/waiting-sums"
    with EmulatedCluster(config) as cluster:
        rows = measure_grids(cluster, [*names.values(), waiting], config)
    print_rows(rows)
    seconds = {row["name"]: row["median_s"] for row in report.counting(rows)}
    predicted = {names[key]: plan.step_time_s for key, plan in plans.items()}
    by_count = {
        count: compare(
            [name for (n, _), name in names.items() if n == count], names.get((count, meshes[0])), seconds, predicted
        )
        for count in (1, config.chunks)
    }
    comparisons = {f"chunks={count}": comparison for count, comparison in by_count.items()}
    comparisons["chunks"] = gains_of_chunks(waiting, by_count, seconds)
    for key, comparison in comparisons.items():
        print(key, comparison, flush=True)
    return {
        "case": asdict(case),
        "name": str(case),
        **config.description(),
        "rows": rows,
        "predicted_s": predicted,
        "comparisons": comparisons,
    }


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with a panel per case: the measured steps of its meshes, and marks for the predicted steps."""
    from matplotlib.figure import Figure

    cases = results["cases"]
    columns = 2 if len(cases) in (2, 4) else min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for panel in panels[len(cases) :]:
        panel.set_visible(False)
    for panel, case in zip(panels, cases, strict=False):
        seconds = {row["name"]: row["median_s"] for row in report.counting(case["rows"])}
        grids = list(dict.fromkeys(name.partition("/")[0] for name in case["predicted_s"]))
        plain = [name for name in seconds if "chunks" not in name and "waiting" not in name]
        cut = [name for name in seconds if "chunks" in name]
        for offset, names, color, label in (
            (-0.2, plain, "#b7b7b7", "whole"),
            (0.2, cut, "#7a9cc6", f"{settings.chunks} chunks"),
        ):
            places = [grids.index(name.partition("/")[0]) + offset for name in names]
            panel.bar(places, [seconds[name] for name in names], 0.38, color=color, label=label)
            panel.plot(places, [case["predicted_s"][name] for name in names], "k_", markersize=12)
        meshes = ["(" + ", ".join(grid.split("x")[:2]) + ")" for grid in grids]
        panel.set_xticks(range(len(meshes)), meshes, fontsize=8)
        panel.set_title(case["name"], fontsize=10)
        panel.set_ylabel("seconds per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, title="DeviceMesh(d1, d2); marks: predicted")
    return figure


def run(settings: Settings) -> Iterator[dict]:
    results: list[dict] = []
    file = Path(settings.out).with_suffix(".json")
    earlier = json.loads(file.read_text())["cases"] if settings.continued else []
    for case in parse_cases(settings.cases, settings.mbit):
        print(f"--- {case}", flush=True)
        before = next((result for result in earlier if result["case"] == asdict(case)), None)
        results.append(before or run_case(settings, case))
        yield {"cases": results}
