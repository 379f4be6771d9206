"""The layout and the grid: every element of a tensor lives where the axes say, exactly once for each copy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout

AXES = ("x", "y", "z", "data")


def test_rank_order_has_x_innermost():
    """The 4D paper's example, §V-B: on 2×2×2(×2) the x groups are (0,1), (2,3) …, the y groups (0,2), (1,3) …."""
    coordinates = [Grid.coordinates(rank, GridSizes(2, 2, 2, 2)) for rank in range(16)]
    expected = [dict(zip(AXES, indices[::-1], strict=True)) for indices in itertools.product((0, 1), repeat=4)]
    assert coordinates == expected


def test_outer_axes_cut_first_and_of_uneven_parts_the_longer_ones_are_first():
    layout = Layout(("y", "z"), ("x",))
    sizes = {"x": 2, "y": 2, "z": 2, "data": 1}
    tile = layout.tile((8, 6), sizes, {"x": 1, "y": 1, "z": 0, "data": 0})
    assert tile == ((4, 6), (3, 6))
    parts = [Layout(("x",)).tile((10,), {"x": 3}, {"x": i})[0] for i in range(3)]
    assert parts == [(0, 4), (4, 7), (7, 10)]


def test_an_axis_splits_one_dim_only():
    with pytest.raises(AssertionError):
        Layout(("x",), ("x", "y"))


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = [[] for _ in shape]
    for axis in draw(st.permutations(AXES)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            dims[dim].append(axis)
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    return shape, Layout(*map(tuple, dims)), sizes


@given(layouts())
def test_tiles_cover_every_element_once_for_each_copy(case):
    shape, layout, sizes = case
    counted = np.zeros(shape, int)
    for indices in itertools.product(*(range(sizes[axis]) for axis in AXES)):
        tile = layout.tile(shape, sizes, dict(zip(AXES, indices, strict=True)))
        counted[tuple(slice(*r) for r in tile)] += 1
    copies = math.prod(sizes[axis] for axis in AXES if axis not in layout.axes)
    assert (counted == copies).all()
