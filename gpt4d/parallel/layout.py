"""The layout: which mesh axes split each dim of a tensor. The one description of sharding in the project.

Initialisation, gradient reduction, the global norm, checkpoints and exports all read it; nothing else says where an
element of a tensor lives. No torch here: a layout is a value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, init=False)
class Layout:
    """For each dim of a tensor the axes that split it, outermost first; axes not named replicate the tensor.

    ``Layout(("y", "z"), ("x",))`` is the weight [in, out] of a normal layer: rows over y and, within that, over z;
    columns over x; one copy along data.
    """

    dims: tuple[tuple[str, ...], ...]
    axes: frozenset[str] = field(compare=False)  # that split the tensor

    def __init__(self, *dims: tuple[str, ...]):
        named = [axis for dim in dims for axis in dim]
        assert len(named) == len(set(named)), f"an axis splits one dim of a tensor at the most, not {dims}"
        object.__setattr__(self, "dims", tuple(tuple(dim) for dim in dims))
        object.__setattr__(self, "axes", frozenset(named))

    def tile(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], indices: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """The (start, stop) along each dim of the part of a tensor of ``shape`` that lives at ``indices``.

        Each axis cuts what the axes outside it left into near-equal parts, the longer ones first: 10 over 3 is
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


# Where the layers' parameters live (4D paper, §III): what a layer declares, and what a planner counts by.
EMBEDDING = Layout(("x", "z"), ("y",))  # [vocabulary, hidden]
POSITIONS = Layout((), ("y",))  # [positions, hidden]
NORM = Layout(("y",))  # [hidden]


def linear(transposed: bool, parts: int | None = None) -> tuple[Layout, Layout]:
    """Of a fully connected layer: its weight [in, out], or [in, parts, out], and its bias [out], or [parts, out].

    Normal: in over y, out over x; transposed the other way round. z cuts the rows once more, as they are stored.
    """
    contracted, produced = ("x", "y") if transposed else ("y", "x")
    out = ((produced,),) if parts is None else ((), (produced,))
    return Layout((contracted, "z"), *out), Layout(*out)


def over_data(shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Where the optimizer's states of a parameter live when they are cut over data too (ZeRO, stage 1).

    As the parameter does where data does not divide its rows, and if no layer streams it: vectors are small.
    """
    first, *others = layout.dims
    rows = shape[0] // math.prod(sizes[axis] for axis in first)
    if "z" not in first or rows % sizes["data"]:
        return layout
    return Layout((*first, "data"), *others)
