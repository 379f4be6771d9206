"""Print the plan of a resharding.

python -m gpt4d.parallel.resharding src=S0RR src_mesh=2x4 dst=RS0R dst_mesh=2x4 shape=1024,1024,512

A mesh has the shape hosts × devices per host; src_hosts=0,0,1,1 and dst_hosts=… give the host of each device.
Other options: format=table|json, plot=FILE for a Gantt chart of the hosts' links.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from gpt4d.config import ConfigError, asks_for_help, check_choice, check_image_format, from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh, UnitTask, notation, parse
from gpt4d.parallel.resharding.plan import ReshardingPlan, Send, plan
from gpt4d.runtime.files import required_file

_MAX_DEVICES = 4096  # per mesh
_MAX_TILES = 32_768  # intersections of source and destination tiles; each takes one send or more


@dataclass
class ReshardingQuery:
    """The arguments of the command: the resharding to plan, and the format of the output."""

    src: str = MISSING  # layout on the source mesh: S0RR
    src_mesh: str = MISSING  # 2x4
    dst: str = MISSING
    dst_mesh: str = MISSING
    shape: str = MISSING  # shape of the global tensor: 1024,1024,512
    src_hosts: str | None = None  # host of each device: 0,0,1,1
    dst_hosts: str | None = None
    format: str = "table"  # or json
    plot: str | None = None  # file for a Gantt chart


def main(arguments: list[str]) -> None:
    """Run the command."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    query = from_arguments(ReshardingQuery, arguments)
    check_choice("format", query.format, ("table", "json"))
    check_image_format("plot", query.plot)
    shape = _parse_integers("shape", query.shape, ",", "1024,1024,512")
    source_mesh = _parse_mesh("src", query, 0, 0)
    destination_mesh = _parse_mesh("dst", query, len(source_mesh.devices), max(source_mesh.hosts) + 1)
    source, destination = (
        _parse_layout(key, query, shape, mesh) for key, mesh in (("src", source_mesh), ("dst", destination_mesh))
    )
    _check_tiles(query, shape, (source, source_mesh), (destination, destination_mesh))
    resharding_plan = plan(shape, source, source_mesh, destination, destination_mesh)
    print(as_json(resharding_plan) if query.format == "json" else as_table(resharding_plan))
    if query.plot:
        with required_file(Path(query.plot)):
            plot(resharding_plan, Path(query.plot))


def _parse_integers(key: str, text: str, separator: str, example: str, minimum: int = 1) -> tuple[int, ...]:
    is_list = re.fullmatch(rf"\d{{1,18}}({separator}\d{{1,18}})*", text)
    if not is_list or min(map(int, text.split(separator))) < minimum:
        raise ConfigError(
            f'{key}={text}: use integers of at least {minimum} separated by "{separator}", such as {example}'
        )
    return tuple(map(int, text.split(separator)))


def _parse_mesh(side: str, query: ReshardingQuery, first_device: int, first_host: int) -> StageMesh:
    key, hosts_key = f"{side}_mesh", f"{side}_hosts"
    shape = _parse_integers(key, getattr(query, key), "x", "2x4")
    if len(shape) > 10 or math.prod(shape) > _MAX_DEVICES:
        raise ConfigError(f"{key}={getattr(query, key)}: use at most 10 axes (0 to 9) and {_MAX_DEVICES} devices")
    hosts, count = None, math.prod(shape)
    if getattr(query, hosts_key) is not None:
        hosts = _parse_integers(hosts_key, getattr(query, hosts_key), ",", "0,0,1,1", minimum=0)
        if len(hosts) != count:
            raise ConfigError(
                f"{hosts_key}={getattr(query, hosts_key)}: {len(hosts)} hosts, but {key} has {count} devices; "
                "give the host of each device"
            )
    return StageMesh.of_shape(shape, first_device, first_host, hosts)


def _parse_layout(key: str, query: ReshardingQuery, shape: tuple[int, ...], mesh: StageMesh) -> Layout:
    text = getattr(query, key)
    layout = parse(key, text)
    if len(layout.dims) != len(shape):
        raise ConfigError(
            f"{key}={text}: {len(layout.dims)} dim(s), but shape={query.shape} has {len(shape)}; use one R or S per dim"
        )
    axes = [name for name, _ in mesh.axes]
    if unknown := sorted(layout.axes - set(axes)):
        raise ConfigError(
            f"{key}={text}: {key}_mesh={getattr(query, key + '_mesh')} has no axis {unknown[0]}; use {', '.join(axes)}"
        )
    return layout


def _check_tiles(query: ReshardingQuery, shape: tuple[int, ...], *sides: tuple[Layout, StageMesh]) -> None:
    """Raise ConfigError if the layouts have too many common tiles for a plan within minutes."""
    tiles = 1
    for dim in range(len(shape)):
        p, q = (math.prod(dict(mesh.axes)[axis] for axis in layout.dims[dim]) for layout, mesh in sides)
        tiles *= min(p + q - math.gcd(p, q), shape[dim])
    if tiles > _MAX_TILES:
        raise ConfigError(
            f"src={query.src} dst={query.dst}: {tiles} common tiles on these meshes; use smaller meshes, with at most "
            f"{_MAX_TILES} common tiles"
        )


def as_json(plan: ReshardingPlan) -> str:
    """Return the plan as JSON, with unit tasks ordered by the start of their first send.

    The unit of time is one transfer of the global tensor over one host's link.
    """
    by_task: dict[int, list[Send]] = {}
    for send in plan.sends:
        by_task.setdefault(send.task, []).append(send)
    document = {
        "shape": plan.shape,
        "src": notation(plan.source),
        "src_mesh": _mesh_as_json(plan.source_mesh),
        "dst": notation(plan.destination),
        "dst_mesh": _mesh_as_json(plan.destination_mesh),
        "makespan": float(plan.makespan),
        "lower_bound": float(plan.lower_bound),
        "optimal": plan.makespan == plan.lower_bound,
        "tasks": [_task_as_json(plan.tasks[number], sends) for number, sends in by_task.items()],
    }
    return json.dumps(document, indent=1)


def _mesh_as_json(mesh: StageMesh) -> dict:
    return {"shape": [size for _, size in mesh.axes], "devices": mesh.devices, "hosts": mesh.hosts}


def _task_as_json(task: UnitTask, sends: list[Send]) -> dict:
    keys = "sender", "sender_host", "receivers", "receiver_hosts"
    return {
        **{key: getattr(task, key) for key in ("tile", "elements", "senders", "receivers")},
        "sends": [
            {key: getattr(send, key) for key in keys} | {"start": float(send.start), "stop": float(send.stop)}
            for send in sends
        ],
    }


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
        tile = ", ".join(f"{start}:{stop}" for start, stop in send.tile)
        receivers = (", ".join(map(str, each)) for each in (send.receiver_hosts, send.receivers))
        times = (f"{float(time):.4f}" for time in (send.start, send.stop))
        table.add_row(f"[{tile}]", str(send.sender_host), str(send.sender), *receivers, *times)
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join([_title(plan), capture.get().rstrip("\n"), "", _summary(plan)])


def _title(plan: ReshardingPlan) -> str:
    def side(layout, mesh: StageMesh) -> str:
        return f"{notation(layout)} on {'×'.join(str(size) for _, size in mesh.axes)}"

    ends = side(plan.source, plan.source_mesh), side(plan.destination, plan.destination_mesh)
    return f"{'×'.join(map(str, plan.shape))}: {' → '.join(ends)}"


def _summary(plan: ReshardingPlan) -> str:
    proof = "optimal" if plan.makespan == plan.lower_bound else "not proved optimal"
    return (
        f"{len(plan.tasks)} unit task(s), {len(plan.sends)} send(s): makespan {float(plan.makespan):.4f}, lower bound "
        f"{float(plan.lower_bound):.4f} ({proof}), in units of the entire tensor over one host's link"
    )


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


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
