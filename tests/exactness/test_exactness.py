"""Random configurations train as on one device, or are rejected in one clear line."""

import pytest

from gpt4d.config import ConfigError
from gpt4d.validation import validate
from tests.exactness.cases import FAMILIES, draw
from tests.exactness.comparison import check
from tests.support.grids import full

CHUNK = 12  # cases of a test
# 155 has parts of heads of keys and values; in 1226 a U-Net drops elements of inputs that the backward recomputes.
SEEDS = (153, 154, 155, 158, 164, 165, 166, 169, 172, 1226)
MORE_SEEDS = [range(first, first + CHUNK) for first in (150, 162, *range(1000, 1504, CHUNK))]


@pytest.mark.parametrize("seeds", [SEEDS, *map(full, MORE_SEEDS)], ids=lambda seeds: str(seeds[0]))
def test_random_configurations_train_as_on_one_device(ranks, seeds):
    results = [check(ranks, draw(seed)) for seed in seeds]
    assert sum(bool(result.rejection) for result in results) <= len(seeds) // 2, "too few cases were trained"
    problems = [f"{result.case}: {result.problem}" for result in results if result.problem]
    assert not problems, "\n".join(problems)


def test_the_fixed_seeds_have_every_family_plan_and_uneven_axes():
    cases = [draw(seed) for seed in SEEDS]
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.plan for case in cases} == {"grid", "atp", "stages"}
    assert {3, 5, 6, 8} <= {case.world_size for case in cases}


@pytest.mark.full
def test_few_random_configurations_are_rejected():
    rejected = 0
    for seed in range(2000, 2040):
        case = draw(seed)
        try:
            validate(case.config, case.world_size)
        except ConfigError:
            rejected += 1
    assert rejected <= 8


def test_a_seed_draws_the_same_configuration_again():
    assert draw(7) == draw(7) and draw(7) != draw(8)
