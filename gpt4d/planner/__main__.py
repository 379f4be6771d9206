"""``python -m gpt4d.planner world_size=32 model=gpt_20b cluster=perlmutter``: which grid, how fast, will it fit?

Without world_size: on how few devices this trains. With parallel.mode=atp: which DeviceMesh(d1, d2). Other words are
train.py's. No torch here: it answers at once, on any laptop.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from gpt4d.config import Config, ConfigError, check_choice, check_picture, check_values, compose, from_arguments
from gpt4d.model import registry
from gpt4d.planner import atp, tables
from gpt4d.planner.search import check_open, fewest_devices, rank
from gpt4d.runtime.errors import one_line_errors

_LIMIT = 4096  # devices, where the fewest are asked for


@dataclass
class Query:
    """What the planner is asked, besides the configuration."""

    world_size: int | None = None  # devices
    top: int = 10
    format: str = "table"  # or json
    plot: str | None = None  # a picture's file
    cost: str = "ours"  # or aware, agnostic: the 4D paper's models of communication


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("--help", "-h"):
        print(__doc__)
        return
    own = {f"{field.name}=" for field in fields(Query)}
    query = from_arguments(Query, [word for word in arguments if word.startswith(tuple(own))])
    config = compose([word for word in arguments if not word.startswith(tuple(own))])
    _check(query, config)
    if query.world_size is None:
        _tell_fewest(config)
    elif config.parallel.mode == "atp":
        _rank_meshes(config, query)
    else:
        _rank_grids(config, query)


def _check(query: Query, config: Config) -> None:
    check_values(config, registry.of(config.model))
    check_choice("format", query.format, ("table", "json"))
    check_choice("cost", query.cost, ("ours", "aware", "agnostic"))
    check_picture("plot", query.plot)
    for key in ("world_size", "top"):
        if getattr(query, key) is not None and getattr(query, key) < 1:
            raise ConfigError(f"{key}={getattr(query, key)}: use a value of at least 1")
    check_open(config.parallel)


def _tell_fewest(config: Config) -> None:
    fewest = fewest_devices(config, _LIMIT)
    if fewest is None:
        raise ConfigError(
            f"{config.model.name} does not train on what {config.cluster.name} has, nor on {_LIMIT} devices; "
            "with world_size=… it says what stands against it"
        )
    print(f"{config.model.name} trains on {fewest} device(s) of {config.cluster.name} at the least")


def _rank_grids(config: Config, query: Query) -> None:
    ranking = rank(config, query.world_size, query.top, query.cost)
    ranking.check(config, query.world_size)
    if query.format == "json":
        print(tables.as_json(ranking.plans))
    else:
        fewest = fewest_devices(config, query.world_size)
        table = tables.table(config, query.world_size, ranking)
        print(f"{table}\n\nIt trains on {fewest} device(s) at the least.")
    if query.plot:
        title = f"{config.model.name} on {query.world_size} devices of {config.cluster.name}"
        tables.plot(ranking.plans, title, Path(query.plot))


def _rank_meshes(config: Config, query: Query) -> None:
    plans = atp.rank(config, query.world_size)[: query.top]
    if query.format == "json":
        print(tables.meshes_as_json(plans))
    else:
        print(tables.mesh_table(config, query.world_size, plans))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
