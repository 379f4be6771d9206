"""A ranking for people and for programs: a table, JSON, a picture."""

import json
from pathlib import Path

from gpt4d.config import Config
from gpt4d.planner.atp import MeshPlan
from gpt4d.planner.device import AXES
from gpt4d.planner.estimate import Plan
from gpt4d.planner.search import Ranking

_COLOURS = {"x": "#1f77b4", "y": "#2ca02c", "z": "#d62728", "data": "#9467bd", "world": "#7f7f7f"}


def as_json(plans: list[Plan]) -> str:
    """A list, best first: overrides, times in s, bytes a rank sends in a step, memory in GiB."""
    entries = [
        {
            "grid": plan.sizes._asdict(),
            "overrides": plan.overrides,
            "step_time_s": plan.step_time_s,
            "compute_s": plan.compute_s,
            "comm": plan.comm,
            "memory_gib": plan.memory_gib,
            "memory": plan.memory,
            "micro_batch_size": plan.micro_batch,
            "published_s": plan.published_s,
            "mfu": plan.mfu,
            "hfu": plan.hfu,
        }
        for plan in plans
    ]
    return json.dumps(entries, indent=1)


def table(config: Config, devices: int, ranking: Ranking) -> str:
    """What there is to know at a glance; then the overrides to paste."""
    from rich import box
    from rich.table import Table

    axes = [axis for axis in AXES if any(axis in plan.comm for plan in ranking.plans)]
    whole = Table(box=box.SIMPLE_HEAD, header_style="", title_justify="left", title_style="")
    whole.title = f"{config.model.name} on {devices} device(s) of {config.cluster.name}: a step, by "
    by_published = any(plan.published_s is not None for plan in ranking.plans)
    whole.title += "the paper's seconds of communication" if by_published else "its time"
    whole.add_column("grid x·y·z·data")
    for heading in ("at once", "step", "computing", *(f"waits {axis}" for axis in axes), "hidden", "memory"):
        whole.add_column(heading, justify="right")
    if config.cluster.peak_tflops:
        whole.add_column("MFU", justify="right")
    if by_published:
        whole.add_column("paper", justify="right")
    for plan in ranking.plans:
        waits = (_seconds(plan.comm[axis]["exposed_s"]) if axis in plan.comm else "" for axis in axes)
        cells = [str(plan.sizes), str(plan.micro_batch), _seconds(plan.step_time_s), _seconds(plan.compute_s), *waits]
        cells += [_seconds(plan.hidden_s), f"{plan.memory_gib:.1f} GiB"]
        cells += [f"{plan.mfu:.0%}"] if plan.mfu else []
        whole.add_row(*cells, *([_seconds(plan.published_s)] if by_published else []))
    return "\n".join([_text(whole), *_left_out(config, ranking), "", *(" ".join(p.overrides) for p in ranking.plans)])


def meshes_as_json(plans: list[MeshPlan]) -> str:
    """A list, least communication first. ATP's layer is the 4D layer with x = d1 and y = d2: the overrides say so."""
    entries = [
        {
            "mesh": list(plan.mesh),
            "overrides": [f"parallel.gx={plan.mesh.d1}", f"parallel.gy={plan.mesh.d2}"],
            "t_comm_s": plan.t_comm_s,
            "step_time_s": plan.compute_s + plan.t_comm_s,
            "compute_s": plan.compute_s,
            "comm": plan.comm,
            "memory_gib": plan.memory_gib,
            "problem": plan.problem,
        }
        for plan in plans
    ]
    return json.dumps(entries, indent=1)


def mesh_table(config: Config, devices: int, plans: list[MeshPlan]) -> str:
    """A line for each mesh: what its all-reduces take, and what stands against it."""
    heading = f"{config.model.name} on {devices} device(s) of {config.cluster.name}: "
    lines = [heading + "the all-reduces of a step (ATP paper, Eq. 2)"]
    for plan in plans:
        (d1, d2), of = plan.mesh, plan.comm
        times = f"{_seconds(of['d1']['time_s'])} along d1, {_seconds(of['d2']['time_s'])} along d2"
        name = f"ATP-{d2:<4} DeviceMesh({d1}, {d2})"
        lines.append(f"{name:26} {_seconds(plan.t_comm_s):>10}: {times}")
        if plan.problem:
            lines.append(f"{'':26} not for this model: {plan.problem}")
    return "\n".join(lines)


def _text(table) -> str:
    from rich.console import Console

    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().strip("\n")


def _left_out(config: Config, ranking: Ranking) -> list[str]:
    words = []
    if ranking.fitting > len(ranking.plans):
        words.append(f"{ranking.fitting - len(ranking.plans)} more grid(s) would do: top=N shows more")
    if ranking.too_large:
        sizes, least = min(ranking.too_large.items(), key=lambda found: found[1])
        words.append(
            f"{len(ranking.too_large)} grid(s) do not fit in {config.cluster.memory_gib:g} GiB; the nearest, {sizes}, "
            f"takes {least:.1f}"
        )
    if ranking.impossible:
        words.append(f"{ranking.impossible} grid(s) cannot be, such as one where {ranking.problem}")
    return words


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def plot(plans: list[Plan], title: str, path: Path) -> None:
    """A bar for each grid: computation, then the waits for each axis. Beside it what communication hides behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.34 * len(plans)), layout="constrained")
    panel = figure.add_subplot()
    names = [str(plan.sizes) for plan in plans]
    panel.barh(names, [plan.compute_s for plan in plans], color="#d9d9d9", label="computation")
    start = [plan.compute_s for plan in plans]
    for axis, colour in _COLOURS.items():
        waits = [plan.comm.get(axis, {"exposed_s": 0.0})["exposed_s"] for plan in plans]
        if any(waits):
            panel.barh(names, waits, left=start, color=colour, label=f"waiting for {axis}")
        start = [a + b for a, b in zip(start, waits, strict=True)]
    panel.plot([plan.hidden_s for plan in plans], names, "k|", markersize=9, label="communication hidden")
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("seconds of a step, predicted")
    panel.set_ylabel("grid (x, y, z, data)")
    panel.set_title(title)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
