"""The layout: which mesh axes split each dim of a tensor. The one description of sharding in the project.

Initialization, gradient reduction, the global norm, checkpoints, exports, resharding and the planner all read it;
nothing else says where an element of a tensor lives. This module does not import torch: a layout is a value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpt4d.config import GridSizes

# Splits a dim of an activation too, though it is no axis of the grid: a device has its part of every chunk of the
# microbatch, one after another (parallel.chunks).
CHUNK = "chunk"


@dataclass(frozen=True, init=False)
class Layout:
    """For each dim of a tensor, the axes that split it, outermost first; axes not named replicate the tensor.

    ``Layout(("y", "z"), ("x",))`` is the weight [in, out] of a normal layer: rows over y and, within that, over z;
    columns over x; one copy along data.
    """

    dims: tuple[tuple[str, ...], ...]
    axes: frozenset[str] = field(compare=False)  # that split the tensor

    def __init__(self, *dims: tuple[str, ...]):
        named = [axis for dim in dims for axis in dim]
        assert len(named) == len(set(named)), f"an axis can split only one dim of a tensor, not {dims}"
        object.__setattr__(self, "dims", tuple(tuple(dim) for dim in dims))
        object.__setattr__(self, "axes", frozenset(named))

    def tile(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], indices: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) along each dim of the part of a tensor of ``shape`` that lives at ``indices``.

        Each axis cuts the range that the outer axes leave into near-equal parts. Longer parts are first: 10 over 3 is
        4, 3, 3.
        """
        assert len(shape) == len(self.dims), f"a layout of {len(self.dims)} dims does not fit the shape {shape}"
        return tuple(self._range(dim, extent, sizes, indices) for dim, extent in zip(self.dims, shape, strict=True))

    @staticmethod
    def _range(dim, extent, sizes, indices) -> tuple[int, int]:
        start, stop = 0, extent
        for axis in dim:
            share, longer = divmod(stop - start, sizes[axis])
            index = indices[axis]
            start += index * share + min(index, longer)
            stop = start + share + (index < longer)
        return start, stop

    def __repr__(self) -> str:
        return f"Layout({', '.join(map(repr, self.dims))})"


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as a global tensor, whatever part of it a rank holds, and its initial values."""

    shape: tuple[int, ...]
    layout: Layout
    unpadded_shape: tuple[int, ...] | None = None  # without padding at the ends of dims; None: there is no padding
    mean: float = 0.0  # initial values are mean + std · normal
    std: float = 0.0
    decay: bool = False  # weight decay applies: matrices
    streamed: bool = False  # layers take it from the sharded weights, which gathers it over z
    between_layers: bool = False  # acts on tokens that x splits with parallel.sequence_parallel

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, which contains no padding and so depends on the model alone."""
        return self.unpadded_shape or self.shape

    def stored_region(self, sizes: Mapping[str, int], indices: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) along each dim of the stored tensor that the device at ``indices`` holds.

        Padding is at the end of a device's shard, so the region begins with the shard and may be shorter or empty.
        """
        tile = self.layout.tile(self.shape, sizes, indices)
        limits = zip(tile, self.stored_shape, strict=True)
        return tuple((min(start, extent), min(stop, extent)) for (start, stop), extent in limits)

    def batch_axes(self, sequence_parallel: bool) -> tuple[str, ...]:
        """Return the axes that split the samples or tokens that the parameter acts on, innermost first."""
        return ("x", "z", "data") if sequence_parallel and self.between_layers else ("z", "data")

    def whole(self) -> "ParameterSpec":
        """Return the same parameter with a copy on each rank of z, which then acts on it as a data axis."""
        return replace(self, layout=Layout(*(tuple(axis for axis in dim if axis != "z") for dim in self.layout.dims)))

    def local_elements(self, sizes: GridSizes) -> int:
        """Return the number of elements of the part that a device holds."""
        return self._elements(self.layout, sizes)

    def optimized_elements(self, sizes: GridSizes, shard_states: bool) -> int:
        """Return the number of elements that a device optimizes: with ``shard_states`` (ZeRO-1) its rows along data."""
        layout = over_data(self, sizes._asdict()) if shard_states else self.layout
        return self._elements(layout, sizes)

    def _elements(self, layout: Layout, sizes: GridSizes) -> int:
        return math.prod(self.shape) // math.prod(getattr(sizes, axis) for axis in layout.axes)


def spec_of(parameter: Any) -> ParameterSpec:
    """Return the spec of a parameter that sharded weights created: its attribute ``spec``."""
    return parameter.spec


def over_data(spec: ParameterSpec, sizes: Mapping[str, int]) -> Layout:
    """Return the layout of a parameter's optimizer states when data splits them too (ZeRO, stage 1).

    It is the parameter's own layout where data does not divide the rows, and for parameters that no layer streams:
    vectors are small.
    """
    first, *others = spec.layout.dims
    rows = spec.shape[0] // math.prod(sizes[axis] for axis in first)
    if not spec.streamed or rows % sizes["data"]:
        return spec.layout
    return Layout((*first, "data"), *others)
