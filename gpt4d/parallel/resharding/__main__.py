"""``python -m gpt4d.parallel.resharding src=S0RR src_mesh=2x4 dst=RS0R dst_mesh=2x4 shape=1024,1024,512``: the plan.

A mesh is hosts × devices of a host; src_hosts=0,0,1,1 and dst_hosts=… say for each device where it is instead. Further:
strategy=broadcast|send_recv|local_allgather|global_allgather|signal, order=ensemble|naive|load_balance|dfs|greedy,
seed=0, effort=1, format=table|json, plot=FILE. No torch here: it answers at once.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from gpt4d.config import ConfigError, check_choice, check_picture, from_arguments
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import report
from gpt4d.parallel.resharding.mesh import Mesh, parse
from gpt4d.parallel.resharding.planning import ORDERS, plan
from gpt4d.parallel.resharding.strategies import STRATEGIES
from gpt4d.runtime.errors import one_line_errors

_DEVICES = 65_536  # of a mesh


@dataclass
class Query:
    """A resharding and what is to be told of it."""

    src: str = MISSING  # the layout on the source mesh: S0RR
    src_mesh: str = MISSING  # 2x4
    dst: str = MISSING
    dst_mesh: str = MISSING
    shape: str = MISSING  # of the global tensor: 1024,1024,512
    src_hosts: str | None = None  # of each device
    dst_hosts: str | None = None
    strategy: str = "broadcast"
    order: str = "ensemble"
    seed: int = 0
    effort: int = 1  # the search looks at so many times as many choices as by default, which takes less than a second
    format: str = "table"  # or json
    plot: str | None = None  # a picture's file


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("--help", "-h"):
        print(__doc__)
        return
    query = from_arguments(Query, arguments)
    check_choice("strategy", query.strategy, STRATEGIES)
    check_choice("order", query.order, ORDERS)
    check_choice("format", query.format, ("table", "json"))
    check_picture("plot", query.plot)
    if query.effort < 1:
        raise ConfigError(f"effort={query.effort}: use a value of at least 1")
    shape = _numbers("shape", query.shape, ",", "1024,1024,512")
    source_mesh = _mesh("src", query, 0, 0)
    destination_mesh = _mesh("dst", query, len(source_mesh.devices), max(source_mesh.hosts) + 1)
    layouts = [_layout(key, query, shape, mesh) for key, mesh in (("src", source_mesh), ("dst", destination_mesh))]
    how = {"strategy": query.strategy, "order": query.order, "seed": query.seed, "effort": query.effort}
    found = plan(shape, layouts[0], source_mesh, layouts[1], destination_mesh, **how)
    print(report.as_json(found) if query.format == "json" else report.table(found))
    if query.plot:
        report.plot(found, Path(query.plot))


def _numbers(key: str, text: str, sign: str, example: str, least: int = 1) -> tuple[int, ...]:
    if not re.fullmatch(rf"\d{{1,18}}({sign}\d{{1,18}})*", text) or min(map(int, text.split(sign))) < least:
        raise ConfigError(
            f'{key}={text}: whole numbers of at least {least} with "{sign}" between them, such as {example}'
        )
    return tuple(map(int, text.split(sign)))


def _mesh(side: str, query: Query, first_device: int, first_host: int) -> Mesh:
    key, hosts_key = f"{side}_mesh", f"{side}_hosts"
    shape = _numbers(key, getattr(query, key), "x", "2x4")
    if len(shape) > 10 or math.prod(shape) > _DEVICES:
        raise ConfigError(f"{key}={getattr(query, key)}: use 10 axes, 0 to 9, and {_DEVICES} devices at the most")
    hosts, count = None, math.prod(shape)
    if getattr(query, hosts_key) is not None:
        hosts = _numbers(hosts_key, getattr(query, hosts_key), ",", "0,0,1,1", least=0)
        if len(hosts) != count:
            raise ConfigError(
                f"{hosts_key}={getattr(query, hosts_key)}: {len(hosts)} hosts, but {key} has {count} devices; "
                "name the host of each"
            )
    return Mesh.of_shape(shape, first_device, first_host, hosts)


def _layout(key: str, query: Query, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    text = getattr(query, key)
    layout = parse(key, text)
    if len(layout.dims) != len(shape):
        raise ConfigError(
            f"{key}={text}: {len(layout.dims)} dims, but shape={query.shape} has {len(shape)}; use as many"
        )
    axes = [name for name, _ in mesh.axes]
    if unknown := sorted(layout.axes - set(axes)):
        raise ConfigError(
            f"{key}={text}: {key}_mesh={getattr(query, key + '_mesh')} has no axis {unknown[0]}; use {', '.join(axes)}"
        )
    return layout


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
