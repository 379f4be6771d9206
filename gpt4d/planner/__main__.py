"""Rank the grids that can train a model on a machine, by time of a step: ``python -m gpt4d.planner world_size=32``.

Further arguments are overrides, as for train.py: model=gpt_20b cluster=perlmutter. Without world_size, it prints the
fewest devices that can train the model. With parallel.mode=atp, it ranks ATP's DeviceMesh(d1, d2). Nothing here imports
torch, so that it answers at once on any laptop.
"""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from gpt4d.config import (
    Config,
    ConfigError,
    check_at_least,
    check_choice,
    check_picture,
    check_values,
    compose,
    from_arguments,
)
from gpt4d.model import registry
from gpt4d.planner import atp, tables
from gpt4d.planner.search import check_open, fewest_devices, rank
from gpt4d.planner.topology import for_devices
from gpt4d.runtime.errors import one_line_errors

_MAX_DEVICES = 4096  # tried in the search for the fewest


@dataclass
class PlannerQuery:
    """Arguments of the planner besides the configuration."""

    world_size: int | None = None  # number of devices; null: find the fewest
    top: int = 10  # maximum number of plans
    format: str = "table"  # or json
    plot: str | None = None  # file of a picture
    cost: str = "ours"  # or aware, agnostic: rank by the 4D paper's models of communication


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("--help", "-h"):
        print(__doc__)
        return
    own = tuple(f"{field.name}=" for field in fields(PlannerQuery))
    query = from_arguments(PlannerQuery, [argument for argument in arguments if argument.startswith(own)])
    config = compose([argument for argument in arguments if not argument.startswith(own)])
    _check(query, config)
    if query.format == "table" and not any(argument.startswith(("cluster=", "cluster.")) for argument in arguments):
        print(f"cluster is not set: planned for {_machine(config)}; another one is cluster=dgx_h100, for example\n")
    if query.world_size is None:
        _print_fewest(config)
    elif config.parallel.mode == "atp":
        _rank_meshes(config, query.world_size, query)
    else:
        _rank_grids(config, query.world_size, query)


def _check(query: PlannerQuery, config: Config) -> None:
    check_values(config, registry.of(config.model))
    check_choice("format", query.format, ("table", "json"))
    check_choice("cost", query.cost, ("ours", "aware", "agnostic"))
    check_picture("plot", query.plot)
    for key in ("world_size", "top"):
        check_at_least(key, getattr(query, key), 1)
    if config.parallel.mode != "atp":
        check_open(config.parallel)


def _machine(config: Config) -> str:
    """Return the machine, for people."""
    cluster = config.cluster
    memory = f"{cluster.host_gib:g} GiB" if cluster.memory_gib is None else f"{cluster.memory_gib:g} GiB each"
    return f"{cluster.name} ({memory})"


def _print_fewest(config: Config) -> None:
    fewest = fewest_devices(config, _MAX_DEVICES)
    if fewest is None:
        raise ConfigError(
            f"model={config.model.name}: cannot be trained on {config.cluster.name} with up to {_MAX_DEVICES} devices; "
            "pass world_size=N for the reason"
        )
    print(f"{config.model.name} needs at least {fewest} device(s) of {config.cluster.name}")


def _rank_grids(config: Config, devices: int, query: PlannerQuery) -> None:
    config = replace(config, cluster=for_devices(config.cluster, devices))
    ranking = rank(config, devices, query.top, query.cost)
    ranking.check(config, devices)
    if query.format == "json":
        print(tables.as_json(ranking.plans))
    else:
        fewest = fewest_devices(config, devices)
        table = tables.table(config, devices, ranking)
        print(f"{table}\n\nIt needs at least {fewest} device(s).")
    if query.plot:
        title = f"{config.model.name} on {devices} devices of {config.cluster.name}"
        tables.plot(ranking.plans, title, Path(query.plot))


def _rank_meshes(config: Config, devices: int, query: PlannerQuery) -> None:
    plans = atp.rank(config, devices)[: query.top]
    if query.format == "json":
        print(tables.meshes_as_json(plans))
    else:
        print(tables.mesh_table(config, devices, plans))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
