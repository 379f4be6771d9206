"""Memory of grids and pipelines: the largest microbatch that fits, minimum memory, minimum number of devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt4d.config import ClusterConfig, Config, ConfigError, GridSizes
from gpt4d.planner import pipelines
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.options import Level, levels
from gpt4d.planner.topology import for_devices, usable_gib
from gpt4d.planner.workload import compute_bytes, grids, micro_batch_sizes, possible_contexts, training_state

_DOUBT = 1.2  # a prediction from a grid that differs in z and data only is too high by less (measured: 1.09 at most)


def largest_micro_batch(estimate: Estimate, more_than: int = 0) -> tuple[int | None, float]:
    """Return the largest microbatch per device that fits and the GiB it needs; None and the minimum if none fits.

    The minimum is a lower bound if the training state alone does not fit, and otherwise a prediction if
    ``estimate.alike`` leaves no doubt. Microbatches up to ``more_than`` are skipped.
    """
    memory, bound = usable_gib(estimate.config.cluster), estimate.bound_gib()
    if estimate.least_gib() > memory:
        return None, estimate.least_gib()
    choices = [size for size in micro_batch_sizes(estimate.config, estimate.sizes) if size > more_than]
    if not choices:
        return None, estimate.least_gib()
    predicted = {size: bound + estimate.alike[size] for size in choices if size in estimate.alike}

    def fits(size: int) -> bool:
        if predicted.get(size, 0.0) > _DOUBT * memory:
            return False
        needed = estimate.memory_gib(size)
        estimate.alike.setdefault(size, needed - bound)
        return needed <= memory

    # A single microbatch has no accumulated gradients. Among others, a larger microbatch never needs less memory.
    largest, smallest = choices[0], choices[-1]
    if fits(largest):
        return largest, estimate.memory_gib(largest)
    likely = next((size for size in choices if predicted.get(size, math.inf) <= memory), largest)
    if likely != largest and fits(likely):
        smallest = likely
    elif not fits(smallest):
        return None, min(predicted.get(size) or estimate.memory_gib(size) for size in (largest, smallest))
    # Bisection finds the largest one that fits.
    place, too_many = choices.index(smallest), 0
    while place - too_many > 1:
        middle = (place + too_many) // 2
        if fits(choices[middle]):
            place = middle
        else:
            too_many = middle
    return choices[place], estimate.memory_gib(choices[place])


def estimate_of(level: Level, sizes: GridSizes, choice: Mapping[str, Any] | None = None) -> Estimate:
    """Return the estimate of a level on a grid. ``choice``: settings of ``parallel`` that replace the level's."""
    choice = {**level.choice, **(choice or {})}
    description = level.describe([sizes], choice)
    gathered = sizes.z if description.routers else sizes.z > 1
    alike = level.alike[sizes.x, sizes.y, gathered, id(description), *level.options.items(), *choice.items()]
    return Estimate(level.config, sizes, description, choice, level.options, alike=alike)


def with_larger_micro_batch(level: Level, sizes: GridSizes, more_than: int = 0) -> tuple[Estimate, int | None]:
    """Return the estimate of a level and its largest microbatch that fits, if any.

    Tokens are split if they allow a larger one. Microbatches up to ``more_than`` are skipped.
    """
    estimate = estimate_of(level, sizes)
    micro_batch, _ = largest_micro_batch(estimate, more_than)
    if micro_batch != estimate.share and may_split_tokens(estimate.config, estimate.sizes):
        split = estimate_of(level, estimate.sizes, {**estimate.choice, "sequence_parallel": True})
        if larger := largest_micro_batch(split, micro_batch or more_than)[0]:
            return split, larger
    return estimate, micro_batch


def may_split_tokens(config: Config, sizes: GridSizes) -> bool:
    """Return whether sequence parallelism is possible and not enabled."""
    parallel, length = config.parallel, config.train.seq_len // config.parallel.context
    return not parallel.sequence_parallel and sizes.x > 1 and length % sizes.x == 0


def least_gib(level: Level, sizes: GridSizes) -> float:
    """Return the minimum GiB of a device, over all microbatches, that a step needs on a grid."""
    choices = [{}, {"sequence_parallel": True}] if may_split_tokens(level.config, sizes) else [{}]
    return min(
        estimate.memory_gib(micro_batch)
        for estimate in (estimate_of(level, sizes, choice) for choice in choices)
        for possible in [micro_batch_sizes(estimate.config, sizes)]
        for micro_batch in {possible[0], possible[-1]}
    )


def fewest_devices(config: Config, limit: int, keys: Sequence[str] = ()) -> int | None:
    """Return the minimum number of devices, up to ``limit`` and the machine's number, that can train ``config``.

    Args:
        config: the configuration; its grid sizes are ignored.
        limit: maximum number.
        keys: options that the planner may choose (gpt4d.planner.options).

    Returns None if no number of devices is sufficient.
    """
    smallest = levels(config, keys)[-1]
    description = smallest.description
    state_gib = sum(training_state(description, GridSizes(), config.optim, compute_bytes(config)).values()) / GIB
    for devices in range(1, int(min(limit, devices_of(config.cluster))) + 1):
        cluster = for_devices(config.cluster, devices)
        available = usable_gib(cluster) - cluster.reserved_gib
        if available <= 0:
            return None  # devices that share the memory of a node have too little memory each
        if state_gib > available * devices:
            continue
        level = replace(smallest, config=replace(smallest.config, cluster=cluster))
        for sizes in grids(devices) if may_have_one_stage(config) else ():
            contexts = possible_contexts(level.config, description.rules, sizes)
            if contexts and _fits(level.sharing(contexts[-1]), sizes):
                return devices
        if may_have_stages(config) and pipelines.any_fits(level, devices):
            return devices
    return None


def _fits(level: Level, sizes: GridSizes) -> bool:
    memory = usable_gib(level.config.cluster)
    return estimate_of(level, sizes).bound_gib() <= memory and least_gib(level, sizes) <= memory


def may_have_one_stage(config: Config) -> bool:
    """Return whether the planner may choose a single stage."""
    return config.parallel.pipeline.stages in (None, 1)


def may_have_stages(config: Config) -> bool:
    """Return whether the planner may choose a pipeline."""
    return config.parallel.pipeline.stages != 1 and config.train.micro_batch_size is None


def check_machine(cluster: ClusterConfig, devices: int) -> None:
    """Raise ConfigError if the machine has fewer than ``devices`` devices."""
    if devices_of(cluster) < devices:
        raise ConfigError(
            f"cluster.levels: {cluster.name} has {devices_of(cluster)} device(s), not {devices}; use another cluster, "
            "or set ranks: null in the outermost level"
        )


def devices_of(cluster: ClusterConfig) -> float:
    """Return the number of devices of a machine, which may be infinite."""
    return math.prod(math.inf if level.ranks is None else level.ranks for level in cluster.levels)
