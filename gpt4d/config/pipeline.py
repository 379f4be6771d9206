"""Checks of ``parallel.pipeline`` that need no model: stages, their grids and the parts of the batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpt4d.config.checks import share_multiple, split_samples
from gpt4d.config.fields import divisors, shortened
from gpt4d.config.length import batch_sizes, ramp_text
from gpt4d.config.schema import GRID_KEYS, MESH_TEXT, Config, GridSizes, ParallelConfig, TrainConfig
from gpt4d.runtime.errors import ConfigError

SPLIT_BACKWARDS = ("eager_1f1b_w", "zb_h1")  # schedules that separate gradients of inputs from gradients of weights
DEFAULT_SCHEDULE = "eager_1f1b"
_MICROBATCHES_PER_STAGE = 4


def check_pipeline(config: Config) -> None:
    """Check relations between the settings of the pipeline. Raises ConfigError naming key, value and remedy."""
    pipeline, parallel = config.parallel.pipeline, config.parallel
    if (pipeline.stages or 1) == 1:
        return
    if config.train.micro_batch_size is not None:
        raise ConfigError(
            f"train.micro_batch_size={config.train.micro_batch_size}: stages have microbatches of different sizes; "
            "use parallel.pipeline.microbatches, the number of parts of the global batch"
        )
    if parallel.mode == "atp":
        raise ConfigError(
            f"parallel.pipeline.stages={pipeline.stages}: parallel.mode=atp has one stage; use parallel.mode=4d, where "
            + MESH_TEXT
        )
    schedule = pipeline.schedule or DEFAULT_SCHEDULE
    if pipeline.chunks_per_stage > 1 and schedule != "interleaved_1f1b":
        raise ConfigError(
            f"parallel.pipeline.chunks_per_stage={pipeline.chunks_per_stage}: {schedule} has one part of the "
            "model on each stage; use parallel.pipeline.schedule=interleaved_1f1b"
        )


def with_stages(config: Config, stages: int) -> Config:
    """Return the configuration with this many stages and a schedule: eager_1f1b if unset, null for one stage."""
    pipeline = config.parallel.pipeline
    schedule = pipeline.schedule or DEFAULT_SCHEDULE if stages > 1 else None
    pipeline = replace(pipeline, stages=stages, schedule=schedule)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline))


def on_grids(config: Config, grids: Sequence[GridSizes], microbatches: int) -> Config:
    """Return the configuration of a step on stages with these grids, which ``stage_sizes`` returns for it."""
    config, equal = with_stages(config, len(grids)), len({*grids}) == 1
    parallel, train = replace(config.parallel, mode="4d"), config.train
    if equal:
        parallel = parallel.on_grid(grids[0])
    if len(grids) > 1:
        different = None if equal else [str(sizes) for sizes in grids]
        pipeline = replace(parallel.pipeline, microbatches=microbatches, stage_grids=different)
        parallel = replace(parallel, pipeline=pipeline)
    else:
        shards = grids[0].sample_shards(parallel.context)
        train = replace(train, micro_batch_size=train.batch_size // microbatches // shards)
    return replace(config, parallel=parallel, train=train)


def stage_sizes(parallel: ParallelConfig, world_size: int) -> tuple[GridSizes, ...]:
    """Return the grid of each stage. Raises ConfigError unless the grids have ``world_size`` devices in total."""
    pipeline = parallel.pipeline
    stages = pipeline.stages or 1
    if pipeline.stage_grids is None:
        if world_size % stages:
            raise ConfigError(
                f"parallel.pipeline.stages={stages}: does not divide the {world_size} process(es) of this job; "
                f"use one of {shortened(divisors(world_size))}, or set parallel.pipeline.stage_grids"
            )
        return (_grid_sizes(parallel, world_size // stages),) * stages
    grids = tuple(map(GridSizes.parse, items(pipeline.stage_grids)))
    setting = f"parallel.pipeline.stage_grids=[{','.join(items(pipeline.stage_grids))}]"
    if None in grids:
        raise ConfigError(f"{setting}: not a list of grids {'·'.join(GRID_KEYS)}; use [2x2x1x2,4x1x1x2], for example")
    known = tuple(grid for grid in grids if grid)
    if len(known) != stages:
        raise ConfigError(f"{setting}: {len(known)} grid(s) for parallel.pipeline.stages={stages}; give one for each")
    devices = sum(grid.devices for grid in known)
    if devices != world_size:
        raise ConfigError(
            f"{setting}: the grids have {devices} devices, but this job has {world_size} process(es); "
            f"start {devices}, or change the grids"
        )
    return known


def _grid_sizes(parallel: ParallelConfig, world_size: int) -> GridSizes:
    """Return the sizes of the four axes, gdata filled in. Raises ConfigError unless their product is ``world_size``."""
    sizes = parallel.sizes._replace(data=1)
    tensor, keys = sizes.devices, "·".join(GRID_KEYS[:3])
    setting = f"parallel.{keys}={'·'.join(map(str, sizes[:3]))}={tensor}"
    if world_size == 1 < tensor:
        words = " ".join(word for word in sizes.overrides if not word.endswith("=1"))
        raise ConfigError(
            f"{setting}: does not divide the 1 process(es) of this job; start more of them: "
            f"torchrun --nproc-per-node {tensor} train.py {words}"
        )
    if world_size % tensor:
        raise ConfigError(
            f"{setting}: does not divide the {world_size} process(es) of this job; "
            f"start a multiple of {tensor}, or choose {keys} among {shortened(divisors(world_size))}"
        )
    if parallel.gdata not in (None, world_size // tensor):
        raise ConfigError(
            f"parallel.gdata={parallel.gdata}: with {setting} the grid has {tensor * parallel.gdata} devices, but this "
            f"job has {world_size}; use parallel.gdata={world_size // tensor}, or null to use all"
        )
    return sizes._replace(data=world_size // tensor)


def items(value: Any) -> list[str]:
    """Return the items of a list, which may be given as text with commas."""
    return [str(item).strip() for item in (value if isinstance(value, list) else str(value).split(","))]


def num_microbatches(train: TrainConfig, parallel: ParallelConfig, stages: tuple[GridSizes, ...]) -> int:
    """Return the number of microbatches of the global batch. Every stage splits each microbatch over its own grid.

    Raises ConfigError if the number does not divide the batch, or if a stage cannot split the microbatches.
    """
    if len(stages) == 1:
        share = max(1, train.batch_size // stages[0].sample_shards(parallel.context))
        return share // (train.micro_batch_size or share)
    if parallel.context > 1 and len({sizes.batch_shards for sizes in stages}) > 1:
        shards = ", ".join(str(sizes.batch_shards) for sizes in stages)
        raise ConfigError(
            f"parallel.context={parallel.context}: the stages have different gdata·gz ({shards}), and ranks that share "
            "sequences need the same in all stages; use grids with equal gdata·gz, or parallel.context=1"
        )
    given, possible = parallel.pipeline.microbatches, possible_microbatches(train, parallel, stages)
    if given in possible:
        return given
    if not possible:
        multiple = _microbatch_multiple(train, parallel, stages)
        shares = ", ".join(str(sizes.sample_shards(parallel.context)) for sizes in stages)
        reasons = [f"each stage splits one over its {split_samples(parallel)} ({shares})"]
        if parallel.chunks > 1:
            reasons.append(f"cuts each share into parallel.chunks={parallel.chunks}")
        if parallel.sequence_parallel:
            over = ", ".join(str(sizes.x) for sizes in stages)
            reasons.append(f"splits the tokens over its {GRID_KEYS[0]} ({over}) for parallel.sequence_parallel")
        if parallel.pipeline.schedule == "interleaved_1f1b":
            reasons.append(f"interleaved_1f1b takes a multiple of {len(stages)} microbatches")
            multiple *= len(stages)
        size = next(size for size in batch_sizes(train) if size % multiple)
        batch = f"train.batch_size={size}:"
        if size != train.batch_size:
            batch = f"train.batch_ramp={ramp_text(train)}: its batch of {size}"
        raise ConfigError(
            f"{batch} cannot be cut into microbatches: {', '.join(reasons)}; use a multiple of {multiple}"
        )
    if given is not None:
        ramp = " and that divide every batch of train.batch_ramp" if train.batch_ramp else ""
        raise ConfigError(
            f"parallel.pipeline.microbatches={given}: does not cut train.batch_size={train.batch_size} into parts that "
            f"every stage can split over its grid{ramp}; use one of {shortened(possible)}"
        )
    return max((n for n in possible if n <= _MICROBATCHES_PER_STAGE * len(stages)), default=possible[0])


def possible_microbatches(train: TrainConfig, parallel: ParallelConfig, stages: tuple[GridSizes, ...]) -> list[int]:
    """Return the possible numbers of microbatches of the global batch, in ascending order.

    The tensors between stages have fixed shapes. So all batches of ``train.batch_ramp`` have microbatches of one size.
    """
    most, rest = divmod(train.batch_size, _microbatch_multiple(train, parallel, stages))
    multiple = len(stages) if parallel.pipeline.schedule == "interleaved_1f1b" else 1

    def cuts_all(number: int) -> bool:
        return all(size % (train.batch_size // number * multiple) == 0 for size in batch_sizes(train))

    return [] if rest else [n for n in divisors(most) if cuts_all(n)]


def _microbatch_multiple(train: TrainConfig, parallel: ParallelConfig, stages: tuple[GridSizes, ...]) -> int:
    """Return the divisor that a microbatch's number of samples needs, so that every stage can split and chunk it."""
    return math.lcm(
        *(sizes.sample_shards(parallel.context) * share_multiple(train, parallel, sizes) for sizes in stages)
    )
