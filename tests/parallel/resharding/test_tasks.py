"""Meshes, the notation for layouts, and unit tasks: tiles, their senders and their receivers."""

import numpy as np
import pytest
from hypothesis import given, settings

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh, notation, parse, unit_tasks
from tests.parallel.resharding.cases import reshardings


@pytest.mark.parametrize(
    ("spec", "layout"),
    [("S0RR", Layout(("0",), (), ())), ("RS01", Layout((), ("0", "1"))), ("S1S0", Layout(("1",), ("0",)))],
)
def test_spec_and_layout_convert_into_each_other(spec, layout):
    assert parse("src", spec) == layout
    assert notation(layout) == spec


@pytest.mark.parametrize("spec", ["", "S", "RX", "s0R", "S0,R", "S0S0", "S00R"])
def test_invalid_spec_is_rejected_with_its_key(spec):
    with pytest.raises(ConfigError, match=f"^dst={spec}: "):
        parse("dst", spec)


def test_mesh_of_grid_gives_each_rank_its_tile():
    """Two stages on disjoint ranks: z=2, x=2 on ranks 4 to 7; data=2, z=2, y=2 on ranks 8 to 15."""
    residual = Layout(("data", "z"), (), ("y",))  # [batch, sequence, hidden]
    first = StageMesh.of_grid(range(4, 8), GridSizes(x=2, z=2), ranks_per_host=4)
    second = StageMesh.of_grid(range(8, 16), GridSizes(y=2, z=2, data=2), ranks_per_host=4)
    assert first.axes == (("data", 1), ("z", 2), ("y", 1), ("x", 2))
    assert first.hosts == (1,) * 4 and second.hosts == (2,) * 4 + (3,) * 4
    sequence = (0, 3)
    halves, columns = ((0, 4), (4, 8)), ((0, 5), (5, 10))
    assert first.tiles((8, 3, 10), residual) == {
        rank: (halves[(rank - 4) // 2], sequence, (0, 10)) for rank in (4, 5, 6, 7)
    }
    assert second.tiles((8, 3, 10), residual) == {
        8 + 2 * row + column: ((2 * row, 2 * row + 2), sequence, columns[column])
        for row in range(4)
        for column in (0, 1)
    }
    tasks = unit_tasks((8, 3, 10), residual, first, residual, second)
    assert [(task.senders, task.receivers) for task in tasks] == [
        ((4, 5) if receiver < 12 else (6, 7), (receiver,)) for receiver in range(8, 16)
    ]


def test_unit_tasks_of_the_paper_s_figure_2():
    """A 4×4 tensor: S01R gives one row to each of four devices; S0R gives two rows to each of two pairs."""
    first, second = StageMesh.of_shape((2, 2)), StageMesh.of_shape((2, 2), 4, 2)
    tasks = unit_tasks((4, 4), parse("", "S01R"), first, parse("", "S0R"), second)
    assert [(task.tile[0], task.senders, task.receivers) for task in tasks] == [
        ((0, 1), (0,), (4, 5)),
        ((1, 2), (1,), (4, 5)),
        ((2, 3), (2,), (6, 7)),
        ((3, 4), (3,), (6, 7)),
    ]


@settings(max_examples=150, deadline=None)
@given(reshardings())
def test_each_element_is_in_one_task_with_all_its_holders_and_needers(case):
    shape, source, first, destination, second = case
    tasks = unit_tasks(*case)
    task_of = np.full(shape, -1)
    for number, task in enumerate(tasks):
        region = task_of[tuple(slice(*r) for r in task.tile)]
        assert region.size == task.elements > 0 and (region == -1).all()
        region[...] = number
    assert (task_of >= 0).all()
    for mesh, layout, side in ((first, source, "senders"), (second, destination, "receivers")):
        for device, tile in mesh.tiles(shape, layout).items():
            held = np.zeros(shape, bool)
            held[tuple(slice(*r) for r in tile)] = True
            named = np.array([device in getattr(task, side) for task in tasks])
            assert (named[task_of] == held).all()


@settings(max_examples=50, deadline=None)
@given(reshardings())
def test_no_two_tasks_have_the_same_source_and_destination_tile(case):
    shape, source, first, destination, second = case
    tile_of = {**first.tiles(shape, source), **second.tiles(shape, destination)}
    pairs = [(tile_of[task.senders[0]], tile_of[task.receivers[0]]) for task in unit_tasks(*case)]
    assert len(pairs) == len(set(pairs))
