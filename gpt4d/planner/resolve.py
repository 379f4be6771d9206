"""Resolution of ``parallel.*`` for a number of devices: the only place that reads ``parallel.mode``."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt4d.config import Config, ConfigError, GridSizes, grid_problem, pipeline_microbatches, stage_sizes
from gpt4d.config.pipeline import items
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.parallel.pipeline.cuts import balanced
from gpt4d.parallel.pipeline.simulation import Costs
from gpt4d.parallel.plan import ParallelPlan, StagePlan, ranks_in_grid_order
from gpt4d.planner import atp
from gpt4d.planner.search import check_open, rank
from gpt4d.planner.workload import compute_bytes

_TRANSFER_SHARE = 0.1  # of a stage's forward that sending its output takes
_NUM_SHOWN = 3  # plans that a run's first line names


def resolve(config: Config, world_size: int) -> ParallelPlan:
    """Return the plan of a configuration whose values have been checked.

    Raises ConfigError, naming key, value and remedy, if the model or the batch cannot be split over the devices.
    """
    candidates: tuple[str, ...] = ()
    if config.parallel.mode == "auto":
        config, candidates = _search(config, world_size)
    elif config.parallel.mode == "atp":
        config, candidates = _mesh(config, world_size)
    description = registry.describe(config.model)
    sizes = stage_sizes(config.parallel, world_size)
    for grid in dict.fromkeys(sizes):
        if problem := grid_problem(description.rules, config.train, config.parallel, grid):
            raise ConfigError(problem)
    microbatches = _microbatches(config, sizes)
    ranks, stages = 0, []
    for grid, parts in zip(sizes, stage_parts(config, description), strict=True):
        order = ranks_in_grid_order(grid, config.parallel.innermost)
        stages.append(StagePlan(tuple(ranks + rank for rank in order), grid, parts))
        ranks += grid.devices
    crossing = description.crossing(sorted(part for stage in stages for part in stage.parts))
    costs = _costs(config, description, stages, crossing)
    return ParallelPlan(config, tuple(stages), microbatches, crossing, costs, candidates)


def _costs(
    config: Config,
    description: Description,
    stages: Sequence[StagePlan],
    crossing: Mapping[tuple[int, int], Sequence[str]],
) -> Costs:
    """Return what schedules are chosen by: the seconds of the products on each virtual stage, by FLOPs alone.

    The transfer of the stream takes a fixed share of them, and other tensors as much longer as they are larger.
    """
    by_place = {}
    for index, stage in enumerate(stages):
        for chunk, (first, stop) in enumerate(stage.parts):
            flops = sum(unit.layer.flops(config.train.seq_len) for unit in description.units[first:stop])
            seconds = flops / stage.sizes.devices / (config.cluster.matmul_tflops * 1e12)
            by_place[index + chunk * len(stages)] = seconds
    work = [by_place[place] for place in sorted(by_place)]
    size = config.train.batch_size, config.train.seq_len, compute_bytes(config)
    hop = _TRANSFER_SHARE * sum(work) / len(work) / description.stream.nbytes(*size)

    def seconds_of(names: Iterable[str]) -> float:
        return hop * sum(description.tensors[name].nbytes(*size) for name in names)

    gradients = {
        edge: [name for name in names if description.tensors[name].has_gradient] for edge, names in crossing.items()
    }
    return Costs(
        work,
        work,
        work,
        {edge: seconds_of(names) for edge, names in crossing.items()},
        {edge: seconds_of(names) for edge, names in gradients.items() if names},
    )


def _microbatches(config: Config, sizes: tuple[GridSizes, ...]) -> int:
    if len(sizes) > 1:
        return pipeline_microbatches(config.train, config.parallel, sizes)
    share = config.train.batch_size // sizes[0].batch_shards
    return share // (config.train.micro_batch_size or share)


def stage_parts(config: Config, description: Description) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each stage, the indices of the first unit and of the one after the last of its model chunks.

    Raises ConfigError if the model has too few blocks, or if ``parallel.pipeline.cuts`` are not blocks in order.
    """
    pipeline, units = config.parallel.pipeline, description.units
    count = pipeline.stages * pipeline.chunks_per_stage
    places = [index for index, unit in enumerate(units) if unit.block][1:]
    if count > len(places) + 1:
        chunks = f"·chunks_per_stage={pipeline.stages}·{pipeline.chunks_per_stage}"
        raise ConfigError(
            f"parallel.pipeline.stages{chunks if pipeline.chunks_per_stage > 1 else f'={count}'}: the model has "
            f"{len(places) + 1} block(s), and each part needs one; use fewer"
        )
    if pipeline.cuts is None:
        work = [unit.layer.flops(config.train.seq_len) for unit in units]
        begins = balanced(work, count, places)
    else:
        begins = [places[block - 1] for block in _cut_blocks(pipeline.cuts, count, len(places) + 1)]
    bounds = [*zip([0, *begins], [*begins, len(units)], strict=True)]
    return [tuple(bounds[stage :: pipeline.stages]) for stage in range(pipeline.stages)]


def _cut_blocks(cuts: Any, count: int, blocks: int) -> list[int]:
    """Return the blocks that all parts but the first begin with. Raises ConfigError for anything else."""
    numbers = [int(text) if text.isdigit() else -1 for text in items(cuts)]
    setting = f"parallel.pipeline.cuts=[{','.join(items(cuts))}]"
    if numbers != sorted(set(numbers)) or not all(0 < number < blocks for number in numbers):
        raise ConfigError(
            f"{setting}: not blocks in ascending order; use numbers from 1 to {blocks - 1}, such as [{blocks // 2}]"
        )
    if len(numbers) != count - 1:
        raise ConfigError(f"{setting}: {count} parts of the model have {count - 1} cut(s); give as many")
    return numbers


def _search(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on the grid that the planner ranks first. Raises ConfigError if there is none."""
    check_open(config.parallel)
    ranking = rank(config, world_size, top=_NUM_SHOWN)
    ranking.check(config, world_size)
    best = ranking.plans[0]
    x, y, z, data = best.sizes
    parallel = replace(config.parallel, mode="4d", gx=x, gy=y, gz=z, gdata=data, **best.choice)
    train = replace(config.train, micro_batch_size=best.micro_batch)
    lines = tuple(f"{plan.grid} ({plan.step_time_s:.3g} s per step)" for plan in ranking.plans)
    return replace(config, parallel=parallel, train=train), lines


def _mesh(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on a DeviceMesh(d1, d2): the ATP model's choice if ``d1`` and ``d2`` leave one.

    Raises ConfigError if no mesh is possible. A mesh that is given need not fit the machine ``cluster``.
    """
    parallel, train = config.parallel, config.train
    plans = atp.rank(config, world_size)
    possible = plans if parallel.d1 and parallel.d2 else [plan for plan in plans if not plan.problem]
    if not possible:
        raise ConfigError(
            f"parallel.mode=atp: {plans[0]} is not possible, where gx is d1 and gy is d2: {plans[0].problem}"
        )
    best = possible[0]
    if not (parallel.d1 and parallel.d2):
        train = replace(train, micro_batch_size=best.micro_batch or train.micro_batch_size)
    x, y, z, data = best.sizes
    parallel = replace(parallel, mode="4d", d1=None, d2=None, gx=x, gy=y, gz=z, gdata=data, innermost=best.innermost)
    lines = tuple(f"{plan} ({plan.t_comm_s:.3g} s of all-reduces per step)" for plan in possible[:_NUM_SHOWN])
    return replace(config, parallel=parallel, train=train), lines
