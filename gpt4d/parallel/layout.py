"""The layout: which mesh axes split each dim of a tensor. It is the only description of sharding in the project.

Initialization, gradient reduction, the global norm, checkpoints, exports, resharding and the planner all read it. This
module does not import torch: a layout is a value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt4d.config import GridSizes

# Not an axis of the grid, but it also splits a dim of an activation: a device has a shard of each chunk of the
# microbatch, in the order of the chunks (parallel.chunks).
CHUNK = "chunk"


@dataclass(frozen=True, init=False)
class Layout:
    """For each dim of a tensor, the axes that split it, outermost first. All other axes replicate the tensor.

    ``Layout(("y", "z"), ("x",))`` is the layout of a normal layer's weight [in, out]: y splits the rows, z splits each
    shard of y, x splits the columns, and data replicates the weight.
    """

    dims: tuple[tuple[str, ...], ...]
    axes: frozenset[str] = field(compare=False)  # the axes that split the tensor

    def __init__(self, *dims: tuple[str, ...]):
        named = [axis for dim in dims for axis in dim]
        assert len(named) == len(set(named)), f"an axis can split only one dim of a tensor, not {dims}"
        object.__setattr__(self, "dims", tuple(tuple(dim) for dim in dims))
        object.__setattr__(self, "axes", frozenset(named))

    def tile(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], indices: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) along each dim of the shard of a tensor of ``shape`` at ``indices``.

        Each axis splits the range of the outer axes' shard into near-equal ranges, longer ranges first: 10 elements
        over 3 devices are 4, 3, 3.
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


# Parameters of hidden layers, of layers from ids or images, of layers to logits or images, of routers, and of adapters;
# all others. A router also has a STATE, which the step computes.
GROUPS = "matrices", "embeddings", "head", "router", "adapters", "vectors"
ADAPTERS, STATE = "adapters", "state"

# ParameterSpec.summed of a parameter that acts on the tokens between the layers: x, with parallel.sequence_parallel.
BETWEEN_LAYERS = "between layers"


@dataclass(frozen=True)
class Matrices:
    """How a weight consists of matrices from input features to output features, which Muon orthogonalizes.

    Attributes:
        outputs: the dim of the output features. All other dims, except the ``fused`` dims, have the input features.
        fused: the dims whose entries are matrices of equal shape, such as the dim of experts, in ascending order.
        pattern: numbers of consecutive output features of each matrix, which repeat along ``outputs``; empty if all
            output features belong to one matrix.
    """

    outputs: int = 1
    fused: tuple[int, ...] = ()
    pattern: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as a global tensor, with its layout and its initial values."""

    shape: tuple[int, ...]
    layout: Layout
    unpadded_shape: tuple[int, ...] | None = None  # without padding at the ends of dims; None: there is no padding
    mean: float = 0.0  # initial values are mean + std · normal
    std: float = 0.0
    group: str = "vectors"  # one of GROUPS, which decides about learning rate and weight decay, or STATE
    matrices: Matrices | None = None  # the matrices of a weight in the group "matrices"
    streamed: bool = False  # the sharded weights gather it over z before each use, unless it is local
    local: bool = False  # z splits it, and each device uses its own part, which complete experts are
    float8: bool = False  # with train.precision=fp8, it is gathered and multiplied in float8
    # Axes, in addition to z and data, over which its gradient is summed: their names, innermost first; BETWEEN_LAYERS;
    # or the axes that split the heads of an attention, as the number of parts that the heads can be split into.
    summed: tuple[str, ...] | str | int = ()
    lr_factor: float = 1.0  # AdamW's learning rate, divided by the rate of the group (optim.width_transfer)
    frozen: bool = False  # it is not trained: it has no gradient and no optimizer states

    @property
    def has_master_dtype(self) -> bool:
        """Whether it has the dtype of the master weights; all other parameters have the compute dtype."""
        return not self.frozen or self.group == STATE

    @cached_property
    def gathered(self) -> bool:
        """Whether the sharded weights all-gather it over z, which then splits the rows, innermost."""
        gathered = self.streamed and not self.local and "z" in self.layout.axes
        assert not gathered or self.layout.dims[0][-1:] == ("z",), f"z must split the rows of {self}, innermost"
        return gathered

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, which contains no padding and depends only on the model."""
        return self.unpadded_shape or self.shape

    def stored_region(self, sizes: Mapping[str, int], indices: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) along each dim of the stored tensor that the device at ``indices`` holds.

        Padding is at the end of a device's shard, so the region starts where the shard starts. It may be shorter than
        the shard, or empty.
        """
        tile = self.layout.tile(self.shape, sizes, indices)
        limits = zip(tile, self.stored_shape, strict=True)
        return tuple((min(start, extent), min(stop, extent)) for (start, stop), extent in limits)

    def replicated(self) -> "ParameterSpec":
        """Return the spec with the parameter replicated over z, which then acts like the data axis."""
        assert not self.local
        return replace(self, layout=Layout(*(tuple(axis for axis in dim if axis != "z") for dim in self.layout.dims)))

    def with_expert_data(self) -> "ParameterSpec":
        """Return the spec of experts that data also splits."""
        assert self.local
        _, *others = self.layout.dims
        return replace(self, layout=Layout(("data", "z"), *others))

    def local_elements(self, sizes: GridSizes) -> int:
        """Return the number of elements of a device's shard."""
        return math.prod(self.shape) // math.prod(getattr(sizes, axis) for axis in self.layout.axes)

    def over_data(self, sizes: GridSizes, dim: int | None = None) -> "ParameterSpec":
        """Return the spec of a device's optimizer states if data splits their ``dim`` too (ZeRO, stage 1).

        Data does not split the states of a parameter that it splits already, and of a parameter that is not
        ``streamed``, as the small vectors are. It also must divide a device's part of the dim.

        ``dim``: None for the rows, or for the rows of a device's only expert. So the states of a device belong to
        consecutive elements of its shard.
        """
        dims = list(self.layout.dims)
        pairs = zip(self.shape, dims, strict=True)
        extents = [extent // math.prod(getattr(sizes, axis) for axis in axes) for extent, axes in pairs]
        if dim is None:
            dim = int(self.local and extents[0] == 1)
        if "data" in self.layout.axes or not self.streamed or extents[dim] % sizes.data:
            return self
        dims[dim] = (*dims[dim], "data")
        return replace(self, layout=Layout(*dims))

    def optimized_elements(self, sizes: GridSizes, shard_states: bool) -> int:
        """Return the number of elements that a device optimizes. ``shard_states``: data splits them (ZeRO-1)."""
        if self.frozen:
            return 0
        return (self.over_data(sizes) if shard_states else self).local_elements(sizes)


def spec_of(parameter: Any) -> ParameterSpec:
    """Return the spec of a parameter that the sharded weights have created."""
    return parameter.spec
