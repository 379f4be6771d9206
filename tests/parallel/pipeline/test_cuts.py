"""Stages have equal work, and together they are the model."""

import random
from itertools import combinations

import pytest

from gpt4d.model import registry
from gpt4d.parallel.pipeline.schedule import balanced
from tests.support.settings import configured


def most_work(work, begins):
    return max(sum(work[a:b]) for a, b in zip((0, *begins), (*begins, len(work)), strict=True))


def test_no_other_cut_has_less_work_in_its_largest_part():
    draw = random.Random(0)
    for _ in range(200):
        work = [draw.choice((1.0, 1.0, 2.0, 5.0, draw.random())) for _ in range(draw.randint(1, 9))]
        places = sorted(draw.sample(range(1, len(work)), draw.randint(0, len(work) - 1)))
        parts = draw.randint(1, len(places) + 1)
        begins = balanced(work, parts, places)
        assert set(begins) <= set(places) and len(begins) == parts - 1 and begins == sorted(begins)
        best = min(most_work(work, chosen) for chosen in combinations(places, parts - 1))
        assert most_work(work, begins) == pytest.approx(best)


def test_of_equal_choices_the_most_even_one_is_taken():
    assert balanced([3.0, 1.0, 1.0, 1.0, 1.0], 3, range(1, 5)) == [1, 3]
    assert balanced([1.0, 1.0, 1.0, 1.0, 5.0], 4, range(1, 5)) in ([1, 2, 4], [1, 3, 4], [2, 3, 4])


def test_stages_share_nothing_but_tied_weights_and_have_all_parameters():
    description = registry.describe(configured(["model=gpt_tiny"]).model)
    blocks = [index for index, unit in enumerate(description.units) if unit.block]
    bounds = [(0, blocks[1]), (blocks[1], blocks[3]), (blocks[3], len(description.units))]
    stages = [description.stage([part]) for part in bounds]
    assert [len(stage.blocks) for stage in stages] == [1, 2, 1]
    owned = [name for stage in stages for name in stage.parameters.keys() - stage.copied.keys()]
    assert sorted(owned) == sorted(description.parameters)
    assert [list(stage.copied) for stage in stages] == [[], [], ["tokens.weight"]]
    assert stages[2].parameters["tokens.weight"] is description.parameters["tokens.weight"]
    assert [description.part(*part) for part in bounds] == [
        (True, (0,), False), (False, (1, 2), False), (False, (3,), True)
    ]  # fmt: skip
    terms = [stage.contributions["tokens.weight"] for stage in stages]
    assert terms == [1, 0, 1] and description.contributions["tokens.weight"] == 2
