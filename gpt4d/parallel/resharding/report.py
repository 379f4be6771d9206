"""Reports of a plan: a table, JSON, and a Gantt chart of the hosts' links."""

import json
from pathlib import Path

from gpt4d.parallel.resharding.mesh import StageMesh, Tile, UnitTask, notation
from gpt4d.parallel.resharding.plan import ReshardingPlan, Send


def as_json(plan: ReshardingPlan) -> str:
    """Return the plan as JSON, with unit tasks ordered by the start of their first send.

    The unit of time is one transfer of the global tensor over one host's link.
    """
    document = {
        "shape": plan.shape,
        "src": notation(plan.source),
        "src_mesh": _mesh_as_json(plan.source_mesh),
        "dst": notation(plan.destination),
        "dst_mesh": _mesh_as_json(plan.destination_mesh),
        "strategy": plan.strategy,
        "order": plan.order,
        "makespan": float(plan.makespan),
        "lower_bound": float(plan.lower_bound),
        "optimal": plan.makespan == plan.lower_bound,
        "tasks": [_task_as_json(plan.tasks[number], sends) for number, sends in _sends_by_task(plan).items()],
    }
    return json.dumps(document, indent=1)


def _sends_by_task(plan: ReshardingPlan) -> dict[int, list[Send]]:
    by_task: dict[int, list[Send]] = {}
    for send in plan.sends:
        by_task.setdefault(send.task, []).append(send)
    return by_task


def _mesh_as_json(mesh: StageMesh) -> dict:
    return {"shape": [size for _, size in mesh.axes], "devices": mesh.devices, "hosts": mesh.hosts}


def _task_as_json(task: UnitTask, sends: list[Send]) -> dict:
    entry = {"tile": task.tile, "elements": task.elements, "senders": task.senders, "receivers": task.receivers}
    entry["sends"] = [
        {
            "sender": send.sender,
            "sender_host": send.sender_host,
            "receivers": send.receivers,
            "receiver_hosts": send.receiver_hosts,
            "start": float(send.start),
            "stop": float(send.stop),
        }
        for send in sends
    ]
    return entry


def as_table(plan: ReshardingPlan) -> str:
    """Return the plan as text: a title, a table with one line per send in order, and a summary."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="")
    table.add_column("tile")
    for heading in ("host", "sender", "to hosts", "to receivers", "start", "stop"):
        table.add_column(heading, justify="right")
    for send in plan.sends:
        cells = (_ranges(send.tile), send.sender_host, send.sender, _list(send.receiver_hosts), _list(send.receivers))
        table.add_row(*map(str, cells), f"{float(send.start):.4f}", f"{float(send.stop):.4f}")
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join([_title(plan), capture.get().rstrip("\n"), "", _summary(plan)])


def _title(plan: ReshardingPlan) -> str:
    def side(layout, mesh: StageMesh) -> str:
        return f"{notation(layout)} on {'×'.join(str(size) for _, size in mesh.axes)}"

    shape = "×".join(map(str, plan.shape))
    ends = f"{side(plan.source, plan.source_mesh)} → {side(plan.destination, plan.destination_mesh)}"
    return f"{shape}: {ends}, {plan.strategy}, order {plan.order}"


def _summary(plan: ReshardingPlan) -> str:
    proof = f"optimal for {plan.strategy}" if plan.makespan == plan.lower_bound else "not proved optimal"
    return (
        f"{len(plan.tasks)} unit task(s), {len(plan.sends)} send(s): makespan {float(plan.makespan):.4f}, lower bound "
        f"{float(plan.lower_bound):.4f} ({proof}), in units of the entire tensor over one host's link"
    )


def _ranges(tile: Tile) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in tile) + "]"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def plot(plan: ReshardingPlan, path: Path) -> None:
    """Save a Gantt chart of each host's sends and receives to ``path``. Unit tasks have 20 repeating colors."""
    import matplotlib
    from matplotlib.figure import Figure

    rows: dict[tuple[str, int], list[Send]] = {}
    for send in plan.sends:
        for row in [("sends", send.sender_host), *(("receives", host) for host in send.receiver_hosts)]:
            rows.setdefault(row, []).append(send)
    rows = {row: rows[row] for row in sorted(rows, key=lambda row: (row[0] == "receives", row[1]))}
    figure = Figure(figsize=(10, 1.8 + 0.42 * len(rows)), layout="constrained")
    panel = figure.add_subplot()
    colors = matplotlib.colormaps["tab20"]
    for place, sends in enumerate(rows.values()):
        bars = [(float(send.start), float(send.stop - send.start)) for send in sends]
        fill = [colors(send.task % 20) for send in sends]
        panel.broken_barh(bars, (place - 0.4, 0.8), facecolors=fill, edgecolor="white", linewidth=60 / (60 + len(bars)))
        for send, (start, length) in zip(sends, bars, strict=True):
            if length > 0.04 * float(plan.makespan):
                panel.text(start + length / 2, place, str(send.task), ha="center", va="center", fontsize=8)
    panel.axvline(float(plan.lower_bound), color="black", linestyle="--", linewidth=1, label="lower bound")
    panel.set_yticks(range(len(rows)), [f"host {host} {direction}" for direction, host in rows])
    panel.invert_yaxis()
    panel.set_xlim(0, max(1.02 * float(plan.makespan), 1e-9))
    panel.set_xlabel("time, in units of the entire tensor over one host's link")
    panel.set_title(f"{_title(plan)}\nmakespan {float(plan.makespan):.4f}; numbers are unit tasks", fontsize=10)
    figure.legend(loc="outside lower right", frameon=False)
    figure.savefig(path, dpi=120)
