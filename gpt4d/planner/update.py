"""The time, traffic and memory of the update that ends a step: gradient norm, AdamW and Muon."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from gpt4d.config import GridSizes, OptimConfig
from gpt4d.optim.matrices import EXCHANGES, Matrix, matrices_of, num_states, number_of_places, rows_of
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic.costs import Computation
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner.device import Device

_LOCAL_OPERATIONS = 6  # of Muon on a weight: scale, momentum, direction, packing, weight decay, addition


def update(
    device: Device,
    parameters: Mapping[str, ParameterSpec],
    sizes: GridSizes,
    config: OptimConfig,
    element_bytes: int,
    statistics_bytes: int = 0,
) -> None:
    """Account for the gradient norm and the update of ``parameters``.

    Args:
        device: executes the computations and the collectives.
        parameters: the parameters of the computed layers.
        sizes: the grid.
        config: the optimizer's settings.
        element_bytes: bytes of an element in the compute dtype.
        statistics_bytes: bytes of additional values that all ranks sum with the norm.
    """
    trained = [spec for spec in parameters.values() if not spec.frozen]
    nbytes = sum(spec.optimized_elements(sizes, config.shard_states) for spec in trained) * MASTER_BYTES
    device.compute(Computation(moved=nbytes, operations=len(trained)))
    device.do("all_reduce", "world", 3 * 8 + statistics_bytes)
    hidden = [spec for spec in trained if num_states(spec, config) == 1]
    others = [spec for spec in trained if num_states(spec, config) == 2]
    # AdamW reads and writes the weight, the gradient (to clip it) and two states.
    nbytes = sum(spec.optimized_elements(sizes, config.shard_states) for spec in others) * MASTER_BYTES
    device.compute(Computation(moved=8 * nbytes, operations=len(others)))
    if hidden:
        _update_matrices(device, hidden, sizes, config, element_bytes)


def _update_matrices(
    device: Device, specs: list[ParameterSpec], sizes: GridSizes, config: OptimConfig, element_bytes: int
) -> None:
    """Account for gpt4d.optim.muon.Muon. Each device has an equal share of the matrices and of each exchange."""
    specs = [spec.over_data(sizes) if config.shard_states else spec for spec in specs]
    # Equal blocks have equal weights.
    found = [(matrix, count) for spec, count in Counter(specs).items() for matrix in matrices_of(spec, sizes)]
    rows = sum(rows_of(spec, sizes).local_elements(sizes) for spec in specs)
    shard = sum(spec.local_elements(sizes) for spec in specs)
    # Gradient, momentum, direction and weight are read and written; the weight decay is another pass.
    device.compute(Computation(moved=(6 * rows + 4 * shard) * MASTER_BYTES, operations=_LOCAL_OPERATIONS * len(specs)))
    flops = sum(count * _flops(matrix, config.muon.steps) for matrix, count in found) / sizes.devices
    elements = sum(count * matrix.elements for matrix, count in found) / sizes.devices
    operations = -(-3 * config.muon.steps * sum(count for _, count in found) // sizes.devices)
    part = Computation(
        flops=flops / EXCHANGES, moved=6 * elements * element_bytes / EXCHANGES, operations=-(-operations // EXCHANGES)
    )
    sent, returned = (elements * element_bytes / EXCHANGES for elements in _exchanged_elements(specs, sizes))
    gathered = (shard - rows) / max(1, sizes.data - 1) * element_bytes / EXCHANGES
    arriving, returning, gathering = [device.start("reduce_scatter", "stage", sent)], [], []
    for number in range(EXCHANGES + 2):
        if number < EXCHANGES:
            device.wait(arriving[number])
            if number + 1 < EXCHANGES:
                arriving.append(device.start("reduce_scatter", "stage", sent))
            device.compute(part)
            returning.append(device.start("reduce_scatter", "stage", returned))
        if 0 < number <= EXCHANGES:
            device.wait(returning[number - 1])
            gathering.append(device.start("all_gather", "data", gathered) if gathered else None)
        if number > 1:
            device.wait(gathering[number - 2])


def _flops(matrix: Matrix, steps: int) -> float:
    short, long = sorted(matrix.sides)
    return steps * (4 * short * short * long + 2 * short**3)


def _exchanged_elements(specs: list[ParameterSpec], sizes: GridSizes) -> tuple[float, float]:
    """Return the elements of reduce-scatters that send as much as a device sends on average to homes and from its home.

    One of the ranks that have equal rows sends them, and all of these ranks receive their update. A home has an own
    part of each of its matrices. On average over the devices, these parts are the rows of a device for each place.
    """
    if sizes.devices == 1:
        rows = sum(spec.local_elements(sizes) for spec in specs)
        return rows, rows
    sent = returned = 0.0
    for spec in specs:
        rows, places = rows_of(spec, sizes).local_elements(sizes), number_of_places(spec, sizes)
        sent += (math.prod(spec.shape) - places * rows) / (sizes.devices - 1)
        returned += rows * (sizes.devices - places) / (sizes.devices - 1)
    return sent, returned


def update_memory(
    counts: Iterable[tuple[ParameterSpec, int]], sizes: GridSizes, config: OptimConfig, element_bytes: int
) -> float:
    """Return the bytes of temporary tensors of the update on a device: messages and iterated matrices of Muon.

    Args:
        counts: the distinct parameters of the stage, each with the number of such parameters.
        sizes: the grid.
        config: the optimizer's settings.
        element_bytes: bytes of an element in the compute dtype.
    """
    hidden = [(spec, count) for spec, count in counts if not spec.frozen and num_states(spec, config) == 1]
    if not hidden:
        return 0
    hidden = [(spec.over_data(sizes) if config.shard_states else spec, count) for spec, count in hidden]
    rows = sum(count * rows_of(spec, sizes).local_elements(sizes) for spec, count in hidden)
    shard = sum(count * spec.local_elements(sizes) for spec, count in hidden)
    iterated = max(_iterated_elements(matrix) for spec, _ in hidden for matrix in matrices_of(spec, sizes))
    # During an iteration: messages of this exchange, the next one and the previous results, complete matrices, updates.
    # On one device, a sent message is also the received one.
    messages = (8 if sizes.devices > 1 else 6) * rows / EXCHANGES
    gathered = 2 * (shard - rows) / max(1, sizes.data - 1) * sizes.data / EXCHANGES
    return (messages + gathered + iterated) * element_bytes


def _iterated_elements(matrix: Matrix) -> int:
    """Return the elements of the temporary tensors of an iteration: three like the matrix, and two Gram matrices."""
    short, long = sorted(matrix.sides)
    return 3 * short * long + 2 * short * short
