"""Meshes, the notation of layouts, and unit tasks: what is to be sent, who has it and who needs it."""

import numpy as np
import pytest
from hypothesis import given, settings

from gpt4d.config import ConfigError
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import Mesh, notation, parse
from gpt4d.parallel.resharding.tasks import unit_tasks
from tests.parallel.resharding.cases import reshardings


@pytest.mark.parametrize(
    ("spec", "layout"),
    [("S0RR", Layout(("0",), (), ())), ("RS01", Layout((), ("0", "1"))), ("S1S0", Layout(("1",), ("0",)))],
)
def test_a_spec_is_a_layout_and_back(spec, layout):
    assert parse("src", spec) == layout
    assert notation(layout) == spec


@pytest.mark.parametrize("spec", ["", "S", "RX", "s0R", "S0,R", "S0S0", "S00R"])
def test_a_spec_that_denotes_no_layout_is_refused_by_its_key(spec):
    with pytest.raises(ConfigError, match=f"^dst={spec}: "):
        parse("dst", spec)


def test_the_paper_s_figure_2():
    """A 4×4 tensor: S01R gives each of four devices a row; S0R gives two rows to each of two pairs."""
    first, second = Mesh.of_shape((2, 2)), Mesh.of_shape((2, 2), 4, 2)
    tasks = unit_tasks((4, 4), parse("", "S01R"), first, parse("", "S0R"), second)
    assert [(task.tile[0], task.senders, task.receivers) for task in tasks] == [
        ((0, 1), (0,), (4, 5)),
        ((1, 2), (1,), (4, 5)),
        ((2, 3), (2,), (6, 7)),
        ((3, 4), (3,), (6, 7)),
    ]


@settings(max_examples=150, deadline=None)
@given(reshardings())
def test_tasks_are_the_intersections_with_all_who_have_and_all_who_need_them(case):
    """Element by element: it is in one task, and that names exactly the devices whose tiles contain it."""
    shape, source, first, destination, second = case
    tasks = unit_tasks(*case)
    place = np.full(shape, -1)
    for number, task in enumerate(tasks):
        part = place[tuple(slice(*r) for r in task.tile)]
        assert part.size == task.elements > 0 and (part == -1).all()
        part[...] = number
    assert (place >= 0).all()
    for mesh, layout, who in ((first, source, "senders"), (second, destination, "receivers")):
        for device, tile in mesh.tiles(shape, layout).items():
            held = np.zeros(shape, bool)
            held[tuple(slice(*r) for r in tile)] = True
            named = np.array([device in getattr(task, who) for task in tasks])
            assert (named[place] == held).all()


@settings(max_examples=50, deadline=None)
@given(reshardings())
def test_no_two_tasks_could_be_one(case):
    """Two tasks differ in their source tiles or in their destination tiles: there are no more than intersections."""
    shape, source, first, destination, second = case
    owner = {**first.tiles(shape, source), **second.tiles(shape, destination)}
    pairs = [(owner[task.senders[0]], owner[task.receivers[0]]) for task in unit_tasks(*case)]
    assert len(pairs) == len(set(pairs))
