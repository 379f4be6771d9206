"""The time, traffic and memory of the update that ends a step: gradient norm, AdamW and Muon."""

import math
from collections.abc import Iterable, Mapping

from gpt4d.config import GridSizes, OptimConfig
from gpt4d.optim.matrices import EXCHANGES, Matrix, matrices_of, num_states
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.parallel.symbolic.tensor import Computation
from gpt4d.planner.device import Device

_LOCAL_OPERATIONS = 6  # of Muon on a weight: scale, momentum, direction, packing, weight decay, addition


def update(
    device: Device, parameters: Mapping[str, ParameterSpec], sizes: GridSizes, config: OptimConfig, element_bytes: int
) -> None:
    """Account for the gradient norm and the update of ``parameters``.

    Args:
        device: executes the computations and the collectives.
        parameters: the parameters of the computed layers.
        sizes: the grid.
        config: the optimizer's settings.
        element_bytes: bytes of an element in the compute dtype.
    """
    trained = [spec for spec in parameters.values() if not spec.frozen]
    nbytes = sum(spec.optimized_elements(sizes, config.shard_states) for spec in trained) * MASTER_BYTES
    device.compute(Computation(moved=nbytes, operations=len(trained)))
    device.do("all_reduce", "world", 3 * 8)
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
    found = [matrix for spec in specs for matrix in matrices_of(spec, sizes)]
    rows = sum(spec.optimized_elements(sizes, shard_states=True) for spec in specs)
    shard = sum(spec.optimized_elements(sizes, config.shard_states) for spec in specs)
    # Gradient, momentum, direction and weight are read and written; the weight decay is another pass.
    device.compute(Computation(moved=(6 * rows + 4 * shard) * MASTER_BYTES, operations=_LOCAL_OPERATIONS * len(specs)))
    flops = sum(_flops(matrix, config.muon.steps) for matrix in found) / sizes.devices
    elements = sum(matrix.elements for matrix in found) / sizes.devices
    operations = -(-3 * config.muon.steps * len(found) // sizes.devices)
    part = Computation(
        flops=flops / EXCHANGES, moved=6 * elements * element_bytes / EXCHANGES, operations=-(-operations // EXCHANGES)
    )
    # One of the ranks that have equal rows sends them, and all of these ranks receive their update.
    sent = _sent_elements(specs, sizes) * element_bytes / EXCHANGES
    returned = rows * element_bytes / EXCHANGES
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


def _sent_elements(specs: list[ParameterSpec], sizes: GridSizes) -> float:
    """Return the elements of a reduce-scatter that sends as much as a device sends on average to other homes."""
    whole = sum(math.prod(spec.shape) for spec in specs)
    rows = sum(spec.optimized_elements(sizes, shard_states=True) for spec in specs)
    return rows if sizes.devices == 1 else (whole - rows) / (sizes.devices - 1)


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
    rows = sum(count * spec.optimized_elements(sizes, shard_states=True) for spec, count in hidden)
    shard = sum(count * spec.optimized_elements(sizes, config.shard_states) for spec, count in hidden)
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
