"""The matrices of weights, the home rank of each matrix, and the parts that ranks exchange with it. No torch here.

Muon needs complete matrices. Each matrix has one home among the ranks that hold parts of it, which computes its update.
The rows that data replicates are split over data first (``rows_of``), so each rank contributes and receives different
parts.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import GridSizes, OptimConfig
from gpt4d.parallel.layout import Layout, Matrices, ParameterSpec

EXCHANGES = 4  # maximum number of exchanges in a step; only the first messages and the last results are exposed

Region = tuple[tuple[int, int], ...]  # (start, stop) along each dim of a matrix


@dataclass(frozen=True)
class Matrix:
    """A matrix of a weight, as a global tensor with any number of dims for input features and output features.

    Attributes:
        shape: its global shape.
        layout: the axes that split it, data included.
        outputs: the dims of the output features.
        indices: the index along each axis that splits the weight between matrices. Only the devices with these indices
            hold parts of the matrix.
    """

    shape: tuple[int, ...]
    layout: Layout
    outputs: tuple[int, ...]
    indices: tuple[tuple[str, int], ...] = ()

    def is_held_at(self, indices: Mapping[str, int]) -> bool:
        """Return whether the device with these indices along all axes holds a part of the matrix."""
        return all(indices[axis] == index for axis, index in self.indices)

    @property
    def order(self) -> tuple[int, ...]:
        """All dims; the dims of the output features come first."""
        return (*self.outputs, *(dim for dim in range(len(self.shape)) if dim not in self.outputs))

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of output features and input features."""
        outputs = math.prod(self.shape[dim] for dim in self.outputs)
        return outputs, math.prod(self.shape) // outputs

    @property
    def elements(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """FLOPs of one product of a Newton-Schulz step, in proportion."""
        short, long = sorted(self.sides)
        return long * short * short


def num_states(spec: ParameterSpec, config: OptimConfig) -> int:
    """Return the number of tensors with the states of a parameter: Muon's momentum, or AdamW's two averages."""
    if spec.frozen:
        return 0
    return 1 if spec.matrices and config.uses_muon else 2


def row_dim(spec: ParameterSpec) -> int:
    """Return the first dim of a weight that belongs to its matrices."""
    assert spec.matrices is not None
    return min(dim for dim in range(len(spec.shape)) if dim not in spec.matrices.fused)


def rows_of(spec: ParameterSpec, sizes: GridSizes) -> ParameterSpec:
    """Return the spec of the rows whose momentum a device has. ``spec``: the weight, or the device's shard of it."""
    return spec.over_data(sizes, row_dim(spec))


def number_of_places(spec: ParameterSpec, sizes: GridSizes) -> int:
    """Return the number of groups of devices that hold different matrices of a weight."""
    assert spec.matrices is not None
    return math.prod(getattr(sizes, axis) for dim in spec.matrices.fused for axis in spec.layout.dims[dim])


def matrices_of(spec: ParameterSpec, sizes: GridSizes) -> list[Matrix]:
    """Return the matrices of a weight in order. Their layout splits rows over data if possible.

    The matrices that a device holds (``Matrix.is_held_at``) have the order of ``views`` there.
    """
    parts = spec.matrices
    assert parts is not None and spec.unpadded_shape is None, f"Muon does not update {spec}"
    layout = rows_of(spec, sizes).layout
    shape, dims = spec.shape, layout.dims
    if parts.fused:
        return _fused_matrices(parts, shape, layout, sizes)
    if not parts.pattern:
        return [Matrix(shape, layout, (parts.outputs,))]
    before, after = slice(parts.outputs), slice(parts.outputs + 1, None)
    pieces = shape[parts.outputs] // sum(parts.pattern)
    return [
        Matrix(
            (*shape[before], pieces, size, *shape[after]),
            Layout(*dims[before], dims[parts.outputs], (), *dims[after]),
            (parts.outputs, parts.outputs + 1),
        )
        for size in parts.pattern
    ]


def _fused_matrices(parts: Matrices, shape: tuple[int, ...], layout: Layout, sizes: GridSizes) -> list[Matrix]:
    """Return the matrices of a weight with dims whose entries are matrices."""
    kept = [dim for dim in range(len(shape)) if dim not in parts.fused]
    matrix = Matrix(
        tuple(shape[dim] for dim in kept), Layout(*(layout.dims[dim] for dim in kept)), (kept.index(parts.outputs),)
    )
    entries = [_indices_of_entries(layout.dims[dim], shape[dim], sizes) for dim in parts.fused]
    return [replace(matrix, indices=sum(indices, ())) for indices in itertools.product(*entries)]


def _indices_of_entries(axes: Sequence[str], extent: int, sizes: GridSizes) -> list[tuple[tuple[str, int], ...]]:
    """Return the index along each axis of the devices that hold each entry of a dim, which ``axes`` split."""
    counts = [getattr(sizes, axis) for axis in axes]
    own, rest = divmod(extent, math.prod(counts))
    assert not rest, f"{axes} do not divide {extent} matrices"
    indices = itertools.product(*map(range, counts))
    return [tuple(zip(axes, each, strict=True)) for each in indices for _ in range(own)]


def views(tensor: Any, spec: ParameterSpec) -> list[Any]:
    """Return views of the matrices in this rank's shard of a weight, or of some of its rows."""
    parts = spec.matrices
    assert parts is not None
    if parts.fused:
        found = [tensor]
        for dim in reversed(parts.fused):
            found = [view for each in found for view in each.unbind(dim)]
        return found
    if not parts.pattern:
        return [tensor]
    pieces = tensor.unflatten(parts.outputs, (-1, sum(parts.pattern)))
    return list(pieces.split(parts.pattern, parts.outputs + 1))


@dataclass(frozen=True)
class MatrixExchange:
    """The parts of some matrices that ranks exchange with the homes of these matrices.

    Attributes:
        homes: the home of each matrix, an index among the ranks of the stage.
        holders: for each matrix, its regions and the ranks that hold each region. The first rank sends the region.
    """

    homes: Mapping[int, int]
    holders: Mapping[int, Mapping[Region, tuple[int, ...]]]


def exchanges(
    matrices: Sequence[Matrix], coordinates: Sequence[Mapping[str, int]], sizes: GridSizes
) -> list[MatrixExchange]:
    """Return the exchanges of a step, between which the homes compute. Every rank gets the same ones.

    Homes have about equal costs: each matrix, in the order of falling costs, goes to the rank with the lowest cost so
    far among the ranks that hold parts of it.
    Every exchange has about an equal part of the cost of each home. The first and the last one have a home's cheapest
    matrices, because nothing overlaps with the messages of the first one and with the results of the last one.

    Args:
        matrices: all matrices of the stage.
        coordinates: the index along each axis of each rank of the stage.
        sizes: devices along each axis.
    """
    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].cost, index))
    costs, of_home = [0] * len(coordinates), [list[int]() for _ in coordinates]
    holders = {matrix: _holders(matrix, coordinates, sizes) for matrix in set(matrices)}
    ranks_of = {matrix: sorted(itertools.chain.from_iterable(held.values())) for matrix, held in holders.items()}
    for index in order:
        home = min(ranks_of[matrices[index]], key=costs.__getitem__)
        costs[home] += matrices[index].cost
        of_home[home].append(index)
    parts = [dict[int, int]() for _ in range(EXCHANGES)]
    for home, own in enumerate(of_home):
        cheapest, before = own[::-1], 0
        for index in cheapest[::2] + cheapest[1::2][::-1]:
            middle = before + matrices[index].cost / 2
            parts[int(EXCHANGES * middle / costs[home])][index] = home
            before += matrices[index].cost
    return [
        MatrixExchange(homes, {index: _senders_first(holders[matrices[index]], home) for index, home in homes.items()})
        for homes in parts
        if homes
    ]


def _holders(
    matrix: Matrix, coordinates: Sequence[Mapping[str, int]], sizes: GridSizes
) -> dict[Region, tuple[int, ...]]:
    """Return the ranks that hold each region of a matrix."""
    found: dict[Region, tuple[int, ...]] = {}
    for rank, indices in enumerate(coordinates):
        if matrix.is_held_at(indices):
            region = matrix.layout.tile(matrix.shape, sizes._asdict(), indices)
            found[region] = (*found.get(region, ()), rank)
    return found


def _senders_first(holders: Mapping[Region, tuple[int, ...]], home: int) -> dict[Region, tuple[int, ...]]:
    """Return the ranks that hold each region, with the rank that sends it first: the home if it holds the region."""
    turned = {}
    for number, (region, ranks) in enumerate(holders.items()):
        first = home if home in ranks else ranks[(home + number) % len(ranks)]
        turned[region] = (first, *(rank for rank in ranks if rank != first))
    return turned
