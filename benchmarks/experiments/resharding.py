"""Cross-mesh resharding on an emulated cluster: Fig. 5 and Table 2 of arXiv 2211.05322, §5.1, all in one run.

    python -m benchmarks resharding [mbit=80] [repeats=5] [out=benchmarks/results/resharding]

Runs every strategy on five hosts with four ranks each, and for Table 2 also the broadcast with simpler schedules. All
plans alternate in one run. With the default ``mbit``, one host's link takes 1.7 s for the entire tensor, as long as the
paper's 10 Gbit/s take for 2 GiB. Each time is compared with its bound: the bytes that the busiest link must carry,
divided by its speed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.driver import measure
from benchmarks.interleave import WorkerSpec
from benchmarks.laboratory.strategies import STRATEGIES, ComparedPlan, ComparedResharding, plan
from benchmarks.settings import DeviceConfig, WorkerSettings
from benchmarks.worker import Contender
from gpt4d.parallel.resharding.mesh import StageMesh, Tile, parse
from gpt4d.parallel.resharding.transfer import Link

PACKAGES = ("torch",)
HOSTS, RANKS = 5, 4
SHAPE = (128, 256, 128)  # 1/128 of the elements of the paper's (1024, 1024, 512)
DTYPE = torch.float32

# The paper's Table 2: specs and (hosts, devices per host). Case 6 has a shape that three divides.
TABLE_2 = {
    "case 1": ("S0RR", (2, 4), "S0RR", (2, 4)),
    "case 2": ("RRR", (2, 4), "S0RR", (2, 4)),
    "case 3": ("RS0R", (2, 4), "S0RR", (2, 4)),
    "case 4": ("RS01R", (2, 4), "S01RR", (2, 4)),
    "case 5": ("S1RR", (2, 4), "S0RR", (2, 4)),
    "case 6": ("S0RR", (2, 4), "S0RR", (3, 4)),
    "case 7": ("S1RR", (1, 4), "RRR", (2, 4)),
    "case 8": ("RRR", (2, 3), "RRR", (3, 2)),
    "case 9": ("RS0R", (2, 4), "RRS0", (2, 4)),
}
# Fig. 5: from one device to 1–4 on one host, and to two on each of 1–4 hosts.
FIGURE_5 = {f"1x{devices}": ("RRR", (1, 1), "RRR", (1, devices)) for devices in (1, 2, 3, 4)}
FIGURE_5 |= {f"{hosts}x2": ("RRR", (1, 1), "RRR", (hosts, 2)) for hosts in (2, 3, 4)}
_COLORS = dict(zip(STRATEGIES, ("#2f6db3", "#b7b7b7", "#d9c89e", "#c6a07a", "#9fbf9f"), strict=True))
ORDERS = ("naive", "load_balance")  # for the cases of Table 2 with broadcast, besides the default


def plans() -> dict[str, ComparedPlan]:
    """Return the plans by name: ``case/strategy``, or ``case/broadcast/order`` for orders other than the default."""
    by_name = {}
    for case, ends in (TABLE_2 | FIGURE_5).items():
        for strategy in STRATEGIES:
            by_name[f"{case}/{strategy}"] = make_plan(case, ends, strategy=strategy)
    for case, ends in TABLE_2.items():
        for order in ORDERS:
            by_name[f"{case}/broadcast/{order}"] = make_plan(case, ends, order=order)
    return by_name


def make_plan(case: str, ends: tuple, **options) -> ComparedPlan:
    source, source_shape, destination, destination_shape = ends
    shape = (384, 256, 42) if case == "case 6" else SHAPE
    first, second = make_mesh(source_shape, 0), make_mesh(destination_shape, source_shape[0])
    return plan(shape, parse("src", source), first, parse("dst", destination), second, **options)


def make_mesh(shape: tuple[int, int], first_host: int) -> StageMesh:
    places = [(first_host + host, device) for host in range(shape[0]) for device in range(shape[1])]
    axes = (("0", shape[0]), ("1", shape[1]))
    return StageMesh(axes, tuple(RANKS * host + device for host, device in places), tuple(host for host, _ in places))


class Transfer:
    """A plan to execute. A step is one transfer, after which each receiver has its local tensor."""

    def __init__(self, link: Link, resharding_plan: ComparedPlan):
        self.plan = resharding_plan
        ranks = (*self.plan.source_mesh.devices, *self.plan.destination_mesh.devices)
        self.resharding = ComparedResharding(link, self.plan, DTYPE) if dist.get_rank() in ranks else None
        self.local = self.out = None

    def step(self) -> Callable[[], dict]:
        if self.resharding is not None:
            if self.local is None and self.out is None:  # in the first step, which is a warm-up
                self._make_tensors()
            self.resharding.start(self.local, self.out).wait()
        return self.check

    def _make_tensors(self) -> None:
        plan, receives = self.plan, self.resharding.program.receives
        mesh, layout = (plan.destination_mesh, plan.destination) if receives else (plan.source_mesh, plan.source)
        tile = mesh.tiles(plan.shape, layout)[dist.get_rank()]
        if receives:
            self.expected = global_tensor(plan.shape)[tuple(slice(*r) for r in tile)]
            self.out = output_buffer(tuple(self.expected.shape))
        else:
            self.local = local_tensor(plan.shape, tile)

    def check(self) -> dict:
        """Compare the received values with the expected ones, so that a wrong transfer ends the run."""
        if self.out is not None and self.plan.strategy != "signal":
            assert torch.equal(self.out, self.expected)
            self.out.zero_()
        return {}


# Only one transfer runs at a time, so all share their tensors.
@cache
def global_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=DTYPE).view(shape)


@cache
def local_tensor(shape: tuple[int, ...], tile: Tile) -> torch.Tensor:
    return global_tensor(shape)[tuple(slice(*r) for r in tile)].contiguous()


@cache
def output_buffer(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


@dataclass
class Settings:
    mbit: float = 80.0
    repeats: int = 5
    out: str = "benchmarks/results/resharding"


def run(settings: Settings) -> Iterator[dict]:
    cluster = DeviceConfig(hosts=HOSTS, ranks=RANKS, mbit=settings.mbit, repeats=settings.repeats, warm_up=1)
    rows = measure(cluster, [WorkerSpec("ours", __name__, "transfers", "torch", ())])
    for row in rows:
        row |= _bounds(row["name"], settings.mbit)
        print(f"{report.line(row)}  bound {row['bound_s']:.3f} s, planned {row['planned_s']:.3f} s", flush=True)
    yield {"hosts": HOSTS, "ranks_per_host": RANKS, "uplink_mbit_per_s": settings.mbit, "rows": rows}


def transfers(settings: WorkerSettings, device: None) -> dict[str, Contender]:
    link = Link("reshard", dist.new_group(), torch.device("cpu"))
    return {name: Contender(Transfer(link, plan).step) for name, plan in plans().items()}


def _bounds(name: str, mbit: float) -> dict[str, float]:
    """Return in seconds the time that the busiest link needs and the time that this plan predicts.

    In these cases the bound of the broadcast is the time of the busiest link.
    """
    by_name = plans()
    plan, best = by_name[name], by_name[f"{name.split('/')[0]}/broadcast"]
    unit_s = math.prod(plan.shape) * DTYPE.itemsize * 8 / (mbit * 1e6)
    return {"bound_s": float(best.lower_bound) * unit_s, "planned_s": float(plan.makespan) * unit_s}


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with a group of bars for each case, and times in units of the bound."""
    from matplotlib.figure import Figure

    times = {row["name"]: row["median_s"] / row["bound_s"] for row in results["rows"]}
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
    return figure
