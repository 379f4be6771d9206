"""Cross-mesh resharding on an emulated cluster: Fig. 5 and Table 2 of arXiv 2211.05322, §5.1, all in one run.

    python -m benchmarks.resharding [mbit=80] [repeats=5] [out=benchmarks/results/resharding]

Runs every strategy on five hosts with four ranks each, and for Table 2 also the broadcast with simpler schedules. All
plans alternate in one run. With the default ``mbit``, one host's link takes 1.7 s for the whole tensor, as long as the
paper's 10 Gbit/s take for 2 GiB. Each time is compared with its bound: the bytes that the busiest link must carry,
divided by its speed. Writes the figures to ``out``.json and draws them in ``out``.png.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import EmulatedCluster, EmulatedClusterConfig
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.workers.reshards import DTYPE, FIGURE_5, HOSTS, RANKS, STRATEGIES, TABLE_2, plans
from gpt4d.config import from_arguments
from gpt4d.runtime.errors import one_line_errors

_COLORS = dict(zip(STRATEGIES, ("#2f6db3", "#b7b7b7", "#d9c89e", "#c6a07a", "#9fbf9f"), strict=True))


@dataclass
class ReshardingBenchmark:
    mbit: float = 80.0
    repeats: int = 5
    out: str = "benchmarks/results/resharding"


def main(arguments: list[str]) -> None:
    config = from_arguments(ReshardingBenchmark, arguments)
    spec = WorkerSpec("ours", "benchmarks.workers.reshards")
    with EmulatedCluster(EmulatedClusterConfig(hosts=HOSTS, ranks=RANKS, mbit=config.mbit)) as cluster:
        rows = interleave(cluster, [spec], config.repeats, warm_up=1)
    for row in rows:
        row |= _bounds(row["name"], config.mbit)
        print(f"{report.line(row)}  bound {row['bound_s']:.3f} s, planned {row['planned_s']:.3f} s", flush=True)
    settings = {"hosts": HOSTS, "ranks_per_host": RANKS, "uplink_mbit_per_s": config.mbit}
    out, command = Path(config.out), "python -m benchmarks.resharding " + " ".join(arguments)
    report.write(out, command.strip(), report.machine("torch"), rows, **settings)
    plot(rows, out)


def _bounds(name: str, mbit: float) -> dict[str, float]:
    """Return in seconds the time that the busiest link needs and the time that this plan predicts.

    In these cases the bound of the broadcast is the time of the busiest link.
    """
    by_name = plans()
    plan, best = by_name[name], by_name[f"{name.split('/')[0]}/broadcast"]
    unit_s = math.prod(plan.shape) * DTYPE.itemsize * 8 / (mbit * 1e6)
    return {"bound_s": float(best.lower_bound) * unit_s, "planned_s": float(plan.makespan) * unit_s}


def plot(rows: list[dict], out: Path) -> None:
    """Draw ``out``.png: a group of bars for each case, with times in units of the bound."""
    from matplotlib.figure import Figure

    times = {row["name"]: row["median_s"] / row["bound_s"] for row in rows}
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2)
    kinds = {strategy: (strategy, color) for strategy, color in _COLORS.items()}
    kinds["broadcast/naive"] = ("broadcast, naive order", "#7a9cc6")
    kinds["broadcast/load_balance"] = ("broadcast, load balance only", "#a9c4e4")
    for panel, cases, title in ((panels[0], TABLE_2, "Table 2"), (panels[1], FIGURE_5, "Fig. 5: to hosts × devices")):
        shown = [kind for kind in kinds if f"{next(iter(cases))}/{kind}" in times]
        width = 0.85 / len(shown)
        for index, kind in enumerate(shown):
            places = [place + (index - (len(shown) - 1) / 2) * width for place in range(len(cases))]
            label, color = kinds[kind]
            panel.bar(places, [times[f"{case}/{kind}"] for case in cases], width, color=color, label=label)
        panel.axhline(1, color="black", linestyle="--", linewidth=1)
        panel.set_xticks(range(len(cases)), list(cases))
        panel.set_ylabel("time / bound")
        panel.set_title(title)
    panels[0].legend(ncols=3, fontsize=8)
    figure.savefig(out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
