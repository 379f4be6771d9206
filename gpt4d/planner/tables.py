"""Output of a ranking: table, JSON, plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt4d.config import ClusterConfig, Config
from gpt4d.model import registry
from gpt4d.planner.atp import MeshPlan
from gpt4d.planner.candidates import Ranking
from gpt4d.planner.device import AXES
from gpt4d.planner.duration import batch_text, duration
from gpt4d.planner.launching import command
from gpt4d.planner.published import comparable, published_lines
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import node_size, total_gib

_COLORS = {
    "x": "#1f77b4",
    "y": "#2ca02c",
    "z": "#d62728",
    "data": "#9467bd",
    "context": "#17becf",
    "world": "#7f7f7f",
}


def as_json(
    plans: list[PlanEstimate], config: Config | None = None, arguments: Sequence[str] = (), price: float | None = None
) -> str:
    """Return a JSON list, best first: overrides, times in s, bytes that a rank sends per step, memory in GiB.

    With ``config``, each entry has the model's numbers of parameters, the duration of the run and its command, to which
    ``arguments`` belong. With ``price``, of an hour of a device, it has the cost of the run. ``published_mfu`` has
    the lower and upper MFU of published runs, and ``published_hours`` the hours at each; None without such runs.
    """
    entries = [
        {
            "grid": plan.sizes._asdict(),
            "rank_order": plan.config.parallel.rank_order or "xy",
            "overrides": plan.overrides,
            "step_time_s": plan.step_time_s,
            "compute_s": plan.slowest.compute_s,
            "comm": plan.slowest.comm,
            "link_bytes": plan.link_bytes,
            "memory_gib": plan.memory_gib,
            "memory": plan.memory,
            "micro_batch_size": plan.micro_batch,
            "stages": [sizes._asdict() for sizes in plan.grids if len(plan.stages) > 1],
            "schedule": plan.config.parallel.pipeline.schedule,
            "microbatches": plan.microbatches,
            "idle_s": plan.idle_s,
            "mfu": plan.mfu,
            "hfu": plan.hfu,
            **(_run(plan, config, arguments, price) if config else {}),
        }
        for plan in plans
    ]
    return json.dumps(entries, indent=1)


def _run(plan: PlanEstimate, config: Config, arguments: Sequence[str], price: float | None) -> dict[str, Any]:
    run, description = duration(config, plan.devices, plan.step_time_s, price), registry.describe(config.model)
    found = comparable(plan, config)
    return {
        "parameters": description.num_parameters,
        "active_parameters": description.active_parameters,
        "devices": plan.devices,
        "steps": run.steps,
        f"{run.unit}_per_s": run.units_per_s,
        "hours": run.hours,
        "device_hours": run.device_hours,
        "published_mfu": found and found.mfu,
        "published_hours": found and [duration(config, plan.devices, step_s).hours for step_s in found.step_s(plan)],
        "rates": config.cluster.rates,
        **({} if price is None else {"run_cost": run.cost}),
        "command": command(config, plan.devices, arguments, plan.overrides),
    }


def runs(plans: list[PlanEstimate], config: Config, arguments: Sequence[str], price: float | None = None) -> str:
    """Return two lines per plan: the duration of the run with its cost, and its command.

    A line about published runs follows the first duration. It is true for all plans.
    """
    lines = []
    for plan in plans:
        lines.append(f"{plan.grid}: {duration(config, plan.devices, plan.step_time_s, price)}")
        lines += [] if plan is not plans[0] else [f"  {line}" for line in published_lines(plan, config, price)]
        lines.append(f"  {command(config, plan.devices, arguments, plan.overrides)}")
    return "\n".join(lines)


def rates_text(cluster: ClusterConfig, devices: int) -> str:
    """Return which rates of a machine were measured, and the command that measures rates that are guesses."""
    if cluster.rates.startswith("guesses"):
        start = f"torchrun --nproc-per-node {devices}" if devices > 1 else "python"
        measure = f"{start} -m gpt4d.planner.calibrate out=mine.yaml"
        seconds = "" if devices > 1 else " in ten seconds"
        return f"{cluster.rates}; measure them{seconds}: {measure}, then add cluster=mine.yaml"
    if cluster.device == "cuda" and cluster.rates.startswith("estimates"):
        return f"{cluster.rates}; gpt4d has measured one H200, and no link between GPUs"
    return cluster.rates


def rates_line(cluster: ClusterConfig, devices: int) -> str:
    """Return ``rates_text`` as a line of an answer."""
    return f"rates of products, memory and links: {rates_text(cluster, devices)}"


def table(config: Config, devices: int, ranking: Ranking) -> str:
    """Return a table of the ranking, and the reasons why other grids are missing."""
    axes = [axis for axis in AXES if any(axis in plan.slowest.comm for plan in ranking.plans)]
    machine = f"{devices} device(s) of {config.cluster.name}"
    grid_table = titled(f"{model_text(config)} on {machine}, {batch_text(config)}, ordered by step time")
    piped = any(len(plan.stages) > 1 for plan in ranking.plans)
    grid_table.add_column("grid x·y·z·data" + (" of each stage" if piped else ""), overflow="fold")
    if piped:
        grid_table.add_column("schedule")
    idle = ["idle"] if piped else []
    for heading in ("microbatch", "step", "compute", *idle, *(f"exposed {axis}" for axis in axes), "hidden", "memory"):
        grid_table.add_column(heading, justify="right")
    if config.cluster.peak_tflops:
        grid_table.add_column("MFU", justify="right")
    for plan in ranking.plans:
        step, schedule = plan.slowest, plan.config.parallel.pipeline.schedule
        exposed = (seconds(step.comm[axis]["exposed_s"]) if axis in step.comm else "" for axis in axes)
        cells = [plan.grid]
        if piped:
            cells.append(f"{schedule} × {plan.microbatches}" if len(plan.stages) > 1 else "")
        cells += [str(plan.micro_batch), seconds(plan.step_time_s), seconds(step.compute_s)]
        if piped:
            cells.append(seconds(plan.idle_s) if len(plan.stages) > 1 else "")
        cells += [*exposed, seconds(step.hidden_s), f"{plan.memory_gib:.1f} GiB"]
        cells += [f"{plan.mfu:.0%}"] if plan.mfu else []
        grid_table.add_row(*cells)
    rates = rates_line(config.cluster, min(devices, node_size(config.cluster)))
    return "\n".join([render(grid_table), *_missing_grids(config, ranking), rates])


def model_text(config: Config) -> str:
    """Return the name of the model and, if a token does not use all parameters, the size of the model."""
    description = registry.describe(config.model)
    return f"{config.model.name} ({description.size})" if description.unused_parameters else config.model.name


def meshes_as_json(plans: list[MeshPlan]) -> str:
    """Return a JSON list in the order of ``plans``, by ascending time of communication."""
    entries = [
        {
            "mesh": list(plan.mesh),
            "rank_order": "d1-d2" if plan.rank_order == "xy" else "d2-d1",
            "overrides": plan.overrides,
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
    """Return a line per mesh: the times of its all-reduces, and why the model cannot use it."""
    heading = f"{model_text(config)} on {devices} device(s) of {config.cluster.name}: "
    lines = [heading + "the all-reduces of a step (ATP paper, Eq. 2)"]
    for plan in plans:
        comm = plan.comm
        times = f"{seconds(comm['d1']['time_s'])} along d1, {seconds(comm['d2']['time_s'])} along d2"
        name = f"ATP-{plan.mesh.d2:<4} {plan}"
        lines.append(f"{name:43} {seconds(plan.t_comm_s):>10}: {times}")
        if plan.problem:
            lines.append(f"{'':43} not possible: {plan.problem}")
    return "\n".join(lines)


def titled(title: str) -> Any:
    """Return an empty table of rich."""
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, header_style="", title_justify="left", title_style="")


def render(table: Any) -> str:
    """Return a table of rich as text without colors."""
    from rich.console import Console

    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().strip("\n")


def _missing_grids(config: Config, ranking: Ranking) -> list[str]:
    lines = []
    if ranking.fitting > len(ranking.plans):
        lines.append(f"{ranking.fitting - len(ranking.plans)} more grid(s) fit; set top=N to see them")
    if ranking.pruned:
        lines.append(f"{ranking.pruned} more were not estimated: they compute, idle and sum outputs for longer")
    if ranking.too_large:
        least, cluster = ranking.least(), config.cluster
        lines.append(
            f"{len(ranking.too_large)} grid(s) do not fit in {total_gib(cluster):.4g} GiB without "
            f"cluster.margin={cluster.margin:g}; the smallest, {least.grid}, needs {least}"
        )
    if ranking.impossible:
        lines.append(f"{ranking.impossible} grid(s) are not possible; the first: {ranking.problem}")
    return lines


def seconds(value: float) -> str:
    """Return seconds in a readable unit."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def plan_line(plan: PlanEstimate) -> str:
    """Return the parts of a step of one plan."""
    exposed = (f"exposed {axis} {seconds(comm['exposed_s'])}" for axis, comm in plan.slowest.comm.items())
    idle = [f"idle {seconds(plan.idle_s)}"] if len(plan.stages) > 1 else []
    mfu = [f"MFU {plan.mfu:.0%}"] if plan.mfu else []
    parts = ", ".join([f"computation {seconds(plan.slowest.compute_s)}", *idle, *exposed, *mfu])
    return f"a step takes {seconds(plan.step_time_s)}: {parts}"


def plot(plans: list[PlanEstimate], title: str, path: Path) -> None:
    """Plot a bar per grid that ends at its step time: computation, exposed communication of each axis, idle time.

    A thin bar below shows the communication that computation hides.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.34 * len(plans)), layout="constrained")
    panel = figure.add_subplot()
    places = list(range(len(plans)))
    start = [0.0 for _ in plans]

    def add(seconds: list[float], label: str, color: str) -> None:
        nonlocal start
        if any(seconds):
            panel.barh(places, seconds, left=start, height=0.6, color=color, label=label)
        start = [a + b for a, b in zip(start, seconds, strict=True)]

    add([plan.slowest.compute_s for plan in plans], "computation", "#d9d9d9")
    for axis, color in _COLORS.items():
        add([plan.slowest.comm.get(axis, {"exposed_s": 0.0})["exposed_s"] for plan in plans], f"exposed {axis}", color)
    add([plan.idle_s for plan in plans], "idle (pipeline)", "#ffbf5e")
    hidden = [place + 0.37 for place in places]
    overlapped = [plan.slowest.hidden_s for plan in plans]
    panel.barh(hidden, overlapped, height=0.14, color="#555555", label="hidden communication")
    panel.set_yticks(places, [plan.grid for plan in plans])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("predicted seconds per step")
    panel.set_ylabel("grid (x, y, z, data)")
    panel.set_title(title, wrap=True)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
