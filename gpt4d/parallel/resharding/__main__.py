"""Print the plan of a resharding.

python -m gpt4d.parallel.resharding src=S0RR src_mesh=2x4 dst=RS0R dst_mesh=2x4 shape=1024,1024,512

A mesh has the shape hosts × devices per host; src_hosts=0,0,1,1 and dst_hosts=… give the host of each device.
Other options: strategy=broadcast|send_recv|local_allgather|global_allgather|signal,
order=ensemble|naive|load_balance|dfs|greedy, seed=0, effort=1, format=table|json, plot=FILE.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from gpt4d.config import ConfigError, asks_for_help, check_choice, check_image_format, from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.config.schema import STRATEGIES
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import report
from gpt4d.parallel.resharding.mesh import StageMesh, parse
from gpt4d.parallel.resharding.plan import ORDERS, plan
from gpt4d.runtime.writing import required_file

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
    strategy: str = "broadcast"
    order: str = "ensemble"
    seed: int = 0
    effort: int = 1  # multiplies the number of choices that the search examines; 1 takes less than a second
    format: str = "table"  # or json
    plot: str | None = None  # file for a Gantt chart


def main(arguments: list[str]) -> None:
    """Run the command."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    query = from_arguments(ReshardingQuery, arguments)
    check_choice("strategy", query.strategy, STRATEGIES)
    check_choice("order", query.order, ORDERS)
    check_choice("format", query.format, ("table", "json"))
    check_image_format("plot", query.plot)
    if query.effort < 1:
        raise ConfigError(f"effort={query.effort}: use a value of at least 1")
    shape = _parse_integers("shape", query.shape, ",", "1024,1024,512")
    source_mesh = _parse_mesh("src", query, 0, 0)
    destination_mesh = _parse_mesh("dst", query, len(source_mesh.devices), max(source_mesh.hosts) + 1)
    source, destination = (
        _parse_layout(key, query, shape, mesh) for key, mesh in (("src", source_mesh), ("dst", destination_mesh))
    )
    _check_tiles(query, shape, (source, source_mesh), (destination, destination_mesh))
    options = {"strategy": query.strategy, "order": query.order, "seed": query.seed, "effort": query.effort}
    resharding_plan = plan(shape, source, source_mesh, destination, destination_mesh, **options)
    print(report.as_json(resharding_plan) if query.format == "json" else report.as_table(resharding_plan))
    if query.plot:
        with required_file(Path(query.plot)):
            report.plot(resharding_plan, Path(query.plot))


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


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
