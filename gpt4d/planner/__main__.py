"""Rank the grids that can train a model on a machine by step time: python -m gpt4d.planner world_size=32.

  world_size=32    number of devices; without it, the fewest that can train the model are printed
  grid=4x1x2x1     answer for this grid gx·gy·gz·gdata only: whether it fits, and settings that make it fit
  tokens=100e9     tokens to train on: hours and device-hours; by default, of train.steps
  price=2.5        price of an hour of a device: adds the cost of the run
  top=10           maximum number of plans
  largest=true     the models of configs/model that world_size devices (1) can pretrain, fine-tune and adapt (LoRA)
  format=json      a list for programs, best first; or table; or megatron, torchtitan: that trainer's arguments
  plot=plan.png    a plot of the plans

A job of another trainer: trainer=megatron or torchtitan, with its degrees tp, pp, cp, dp, ep (and replicate, if dp
shards weights), vp (chunks of a pipeline rank), micro_batch=1, recompute=none, selective or full.

Other arguments are overrides, as for train.py: model=gpt_20b cluster=perlmutter train.batch_size=256. The planner
chooses the settings that they leave open: the grid, pipeline stages, microbatches, optim.shard_states,
train.activation_checkpointing, train.loss_chunks and some of parallel.*. It keeps cluster.margin=0.05 of a device's
memory free. With parallel.mode=atp, it ranks ATP's DeviceMesh(d1, d2). Nothing here imports torch on a machine without
GPUs.
"""

import difflib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpt4d.config import (
    Config,
    ConfigError,
    GridSizes,
    asks_for_help,
    check_at_least,
    check_choice,
    check_image_format,
    check_pipeline,
    check_values,
    compose,
    flag_error,
    from_arguments,
    known_keys,
)
from gpt4d.config.commands import one_line_errors
from gpt4d.config.keys import groups
from gpt4d.data.completion import complete
from gpt4d.model import registry
from gpt4d.planner import atp, largest, tables, trainers
from gpt4d.planner.candidates import MAX_DEVICES, check_machine, fewest_devices
from gpt4d.planner.duration import batch_text
from gpt4d.planner.fitting import Fit
from gpt4d.planner.launching import merged
from gpt4d.planner.options import open_keys
from gpt4d.planner.resolve import resolve
from gpt4d.planner.search import check_open, rank
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import for_devices, usable_gib
from gpt4d.runtime.files import required_file
from gpt4d.runtime.launchers import LARGEST_DEVICES

_OTHER_NAMES = "gpus", "devices", "num_gpus", "n_gpus", "ngpus"  # of world_size
_SILENT_S = 1.0  # time after which a terminal shows progress, and interval of its updates
_THRESHOLD = 1_000_000  # objects between two collections of garbage; recordings are many objects without cycles


@dataclass
class PlannerQuery(trainers.TrainerJob):
    """Arguments of the planner in addition to the configuration. The module's text explains them."""

    world_size: int | None = None
    grid: str | None = None
    tokens: float | None = None
    price: float | None = None
    largest: bool = False
    top: int = 10
    format: str = "table"
    plot: str | None = None


def main(arguments: list[str]) -> None:
    """Print the ranking, the estimate of one grid or the minimum number of devices, as ``arguments`` ask."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    names = known_keys(PlannerQuery)
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            raise flag_error(argument, arguments[place + 1 : place + 2], names)
    own = tuple(f"{name}=" for name in names)
    query = from_arguments(PlannerQuery, [argument for argument in arguments if argument.startswith(own)])
    overrides = [argument for argument in arguments if not argument.startswith(own)]
    for key in (override.partition("=")[0] for override in overrides):
        meant = ["world_size"] if key in _OTHER_NAMES else difflib.get_close_matches(key, names, n=1)
        if meant and key not in {*known_keys(), *groups()}:
            raise ConfigError(f"{key}: there is no such argument; did you mean {meant[0]}?")
    with long_search():
        answer = _answer(query, overrides)
    print(answer)


@contextmanager
def long_search() -> Iterator[None]:
    """Show on a terminal for how long the planner has been working, if that is longer than a second."""
    ended, started, thresholds = threading.Event(), time.monotonic(), gc.get_threshold()

    def show() -> None:
        while not ended.wait(_SILENT_S):
            print(f"\rplanning for {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    gc.set_threshold(_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        ended.set()
        if thread.ident:
            thread.join()
            print("\r\033[K", end="", file=sys.stderr, flush=True)  # clear the line


def _answer(query: PlannerQuery, overrides: list[str]) -> str:
    if query.largest:
        return _largest(query, overrides)
    if query.tokens is not None:
        overrides.append(f"train.tokens={query.tokens:.15g}")
    config = complete(compose(overrides))
    if query.degrees:
        if query.grid is not None:
            raise ConfigError(f"grid={query.grid}: follows from the degrees of the other trainer's job; leave it out")
        query.grid, overrides = trainers.as_plan(query, config, query.world_size, overrides)
        config = complete(compose(overrides))
    _check(query, config)
    assumed = ""
    if query.format == "table" and not any(word.startswith(("cluster=", "cluster.")) for word in overrides):
        assumed = f"cluster is not set: planned for {_machine(config)}; another one is cluster=h100, for example\n\n"
    if query.grid is not None:
        return assumed + _one_grid(config, query, overrides)
    if query.world_size is None:
        return assumed + _fewest(config, open_keys(config, overrides))
    if config.parallel.mode == "atp":
        return assumed + _meshes(config, query.world_size, query)
    return assumed + _grids(config, query.world_size, query, overrides)


def _check(query: PlannerQuery, config: Config) -> None:
    check_values(config, registry.of(config.model))
    check_pipeline(config)
    check_choice("format", query.format, ("table", "json", *trainers.TRAINERS))
    has_plans, of_other = query.world_size is not None or query.grid is not None, query.format in trainers.TRAINERS
    is_atp = config.parallel.mode == "atp"
    if query.format != "table" and not has_plans and not query.largest:
        raise ConfigError(f"format={query.format}: is a form of plans; add world_size=64 or grid=4x1x2x1")
    if of_other and is_atp:
        raise ConfigError(f"format={query.format}: has no meshes; use parallel.mode=4d")
    if query.price is not None and (not has_plans or is_atp or of_other):
        use = "world_size=64, parallel.mode=4d and format=table"
        raise ConfigError(f"price={query.price:g}: is added to the hours of plans; use {use}")
    ranks_grids = query.world_size is not None and query.grid is None and not is_atp
    for key, unused in (
        ("plot", not ranks_grids),
        ("top", query.grid is not None or not has_plans),
    ):
        if unused and (value := getattr(query, key)) != getattr(PlannerQuery(), key) and not query.largest:
            use = "leave it out, or use world_size=64 without grid="
            raise ConfigError(f"{key}={value}: belongs to a ranking of grids; {use}")
    check_image_format("plot", query.plot)
    for key in ("world_size", "top"):
        check_at_least(key, getattr(query, key), 1, LARGEST_DEVICES)
    check_at_least("price", query.price, 0)
    if config.parallel.mode != "atp":
        check_open(config.parallel, "leave it out, or ask for one grid: grid=4x1x2x1")


def _largest(query: PlannerQuery, overrides: list[str]) -> str:
    kept = replace(PlannerQuery(), largest=True, world_size=query.world_size, format=query.format)
    unused = [name for name in known_keys(PlannerQuery) if getattr(query, name) != getattr(kept, name)]
    unused += [word.partition("=")[0] for word in overrides if word.startswith(("model=", "model.", "lora."))]
    if unused:
        raise ConfigError(f"largest=true: plans every model by itself; leave out {', '.join(unused)}")
    check_choice("format", query.format, ("table", "json"))
    config, devices = complete(compose(overrides)), query.world_size or 1
    _check(query, config)
    found = largest.trainable(overrides, devices)
    return largest.as_json(found) if query.format == "json" else largest.table(found, config.cluster, devices)


def _machine(config: Config) -> str:
    """Return a readable name of the machine."""
    cluster = config.cluster
    memory = f"{cluster.host_gib:g} GiB" if cluster.memory_gib is None else f"{cluster.memory_gib:g} GiB each"
    return f"{cluster.name} ({memory})"


def _fewest(config: Config, keys: list[str]) -> str:
    fewest = fewest_devices(config, MAX_DEVICES, keys)
    if fewest is None:
        raise ConfigError(
            f"model={config.model.name}: cannot be trained on {config.cluster.name} with up to {MAX_DEVICES} devices; "
            "pass world_size=N for the reason"
        )
    return (
        f"{tables.model_text(config)}, {batch_text(config)}, needs at least {fewest} device(s) of "
        f"{config.cluster.name}; world_size={fewest} shows how"
    )


def _grids(config: Config, devices: int, query: PlannerQuery, overrides: list[str]) -> str:
    config = replace(config, cluster=for_devices(config.cluster, devices))
    ranking = rank(config, devices, query.top, open_keys(config, overrides))
    ranking.check(config, devices)
    if query.plot:
        title = f"{config.model.name} on {devices} devices of {config.cluster.name}, {batch_text(config)}"
        with required_file(Path(query.plot)):
            tables.plot(ranking.plans, title, Path(query.plot))
    if query.format == "json":
        return tables.as_json(ranking.plans, config, overrides, query.price)
    if query.format in trainers.TRAINERS:
        return _arguments(query.format, ranking.plans[0], overrides)
    runs = tables.runs(ranking.plans, config, overrides, query.price)
    return f"{tables.table(config, devices, ranking)}\n\n{runs}"


def _one_grid(config: Config, query: PlannerQuery, overrides: list[str]) -> str:
    """Return whether a grid fits, and the time of a step. Raises ConfigError if the grid is not possible."""
    sizes = GridSizes.parse(query.grid or "")
    if sizes is None:
        raise ConfigError(f"grid={query.grid}: not the sizes of gx, gy, gz and gdata; use grid=4x1x2x1, for example")
    stages = config.parallel.pipeline.stages or 1
    devices = sizes.devices * stages
    if query.world_size not in (None, devices):
        raise ConfigError(
            f"world_size={query.world_size}: grid={query.grid}{f' on {stages} stages' if stages > 1 else ''} has "
            f"{devices} device(s); use world_size={devices}, or leave it out"
        )
    check_machine(config.cluster, devices)
    plan = resolve(replace(config, parallel=config.parallel.on_grid(sizes, mode="4d")), devices)
    answer = Fit(plan, config.cluster)
    changes = [] if answer.fits else answer.changes()
    if query.format == "json":
        return tables.as_json([plan], plan.config, overrides, query.price)
    if query.format in trainers.TRAINERS and answer.fits:
        return _arguments(query.format, plan, overrides)
    usable, needed = usable_gib(plan.config.cluster), plan.memory_gib
    verdict = "fits" if answer.fits else "does not fit"
    if usable < needed and answer.fits:
        verdict = f"fits only without cluster.margin={config.cluster.margin:g}"
    parts = ", ".join(f"{kind} {gib:.3g}" for kind, gib in plan.memory.items())
    lines = [
        f"{tables.model_text(config)} on grid {plan.grid} of {config.cluster.name}, {batch_text(config)}: {verdict}",
        f"memory of a device: {needed:.4g} of {answer.device_gib:.4g} GiB ({parts})",
        tables.plan_line(plan),
    ]
    lines += [f"it fits with {change}, {tables.seconds(change.plan.step_time_s)} per step" for change in changes]
    if not answer.fits and (smallest := answer.smallest()):
        lines.append(f"the fewest devices that suffice are {smallest.devices}, with {' '.join(smallest.overrides)}")
    lines.append(tables.rates_line(config.cluster, devices))
    if answer.fits:
        lines.append(tables.runs([plan], plan.config, overrides, query.price))
    return "\n".join(lines)


def _arguments(trainer: str, plan: PlanEstimate, overrides: list[str]) -> str:
    """Return the arguments of another trainer for a plan that ``overrides`` ask for."""
    return trainers.arguments(trainer, complete(compose(merged(overrides, plan.overrides))))


def _meshes(config: Config, devices: int, query: PlannerQuery) -> str:
    plans = atp.rank(config, devices)[: query.top]
    if query.format == "json":
        return tables.meshes_as_json(plans)
    return f"{tables.mesh_table(config, devices, plans)}\n{tables.rates_line(config.cluster, devices)}"


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
