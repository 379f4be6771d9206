"""The layout: which mesh axes split each dim of a tensor. The one description of sharding in the project.

Initialisation, gradient reduction, the global norm, checkpoints and exports all read it; nothing else says where an
element of a tensor lives. No torch here: a layout is a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, init=False)
class Layout:
    """For each dim of a tensor the axes that split it, outermost first; axes not named replicate the tensor.

    ``Layout(("y", "z"), ("x",))`` is the weight [in, out] of a normal layer: rows over y and, within that, over z;
    columns over x; one copy along data.
    """

    dims: tuple[tuple[str, ...], ...]

    def __init__(self, *dims: tuple[str, ...]):
        named = [axis for dim in dims for axis in dim]
        assert len(named) == len(set(named)), f"an axis splits one dim of a tensor at the most, not {dims}"
        object.__setattr__(self, "dims", tuple(tuple(dim) for dim in dims))

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split the tensor."""
        return frozenset(axis for dim in self.dims for axis in dim)

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
