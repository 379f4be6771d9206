"""Random numbers depend only on their global position: a part of a tensor equals that part of the whole, bitwise."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel import random
from tests.grids import TINY_MODEL, build_model, global_tensor


def test_any_part_of_a_normal_tensor_equals_that_part_of_the_whole():
    shape, key = (37, 3, 29), random.key(0, "w")
    whole = random.normal(key, shape, tuple(slice(0, n) for n in shape))
    for part in [(slice(5, 20), slice(0, 3), slice(7, 11)), (slice(36, 37), slice(1, 2), slice(0, 29))]:
        assert torch.equal(random.normal(key, shape, part), whole[part])


def test_the_chunk_size_does_not_change_a_normal_tensor(monkeypatch):
    shape, key = (50, 20), random.key(0, "w")
    slices = (slice(0, 50), slice(0, 20))
    whole = random.normal(key, shape, slices)
    monkeypatch.setattr(random, "_CHUNK", 60)
    assert torch.equal(random.normal(key, shape, slices), whole)


def test_normal_numbers_are_normal_and_keys_give_independent_ones():
    slices = (slice(0, 1000), slice(0, 400))
    values = random.normal(random.key(0, "a"), (1000, 400), slices).double()
    n = values.numel()
    moments = [values.pow(power).mean().item() for power in (1, 2, 3, 4)]
    # Five standard errors of each moment of a standard normal.
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert moment == pytest.approx(expected, abs=5 * (variance / n) ** 0.5)
    for lag in (1, 399, 400, 401):
        correlation = (values.flatten()[lag:] * values.flatten()[:-lag]).mean().item()
        assert abs(correlation) < 5 / n**0.5
    other_values = random.normal(random.key(1, "a"), (1000, 400), slices).double()
    assert abs((values * other_values).mean().item()) < 5 / n**0.5


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_dropout_rate_holds_in_every_row_and_column(drop):
    rows = random.fold(random.key(3, "d"), torch.arange(600))
    keep = random.keep_mask(rows, 500, 0, drop)
    bound = 5.5 * (drop * (1 - drop)) ** 0.5  # standard errors; there are 1,100 rows and columns
    assert abs(keep.double().mean() - (1 - drop)) < bound / keep.numel() ** 0.5
    assert (keep.double().mean(0) - (1 - drop)).abs().max() < bound / 600**0.5
    assert (keep.double().mean(1) - (1 - drop)).abs().max() < bound / 500**0.5


def test_any_columns_of_a_mask_equal_those_of_the_whole():
    rows = random.fold(random.key(3, "d"), torch.arange(12).view(3, 4))
    whole = random.keep_mask(rows, 30, 0, 0.3)
    for offset, columns in [(0, 30), (6, 6), (3, 11), (29, 1)]:
        assert torch.equal(random.keep_mask(rows, columns, offset, 0.3), whole[..., offset : offset + columns])


def initial_weights(sizes):
    model = build_model(TINY_MODEL, sizes, torch.float32)
    grid = model.weights.grid
    return {name: global_tensor(p, p.spec, grid) for name, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (4, 1, 1, 2), (1, 3, 1, 1), (1, 2, 4, 1), (2, 2, 2, 2)], ids=str)
def test_initial_weights_are_bit_equal_on_every_grid(ranks, sizes):
    sizes = GridSizes(*sizes)
    (serial,) = ranks.run(1, initial_weights, GridSizes())
    for weights in ranks.run(sizes.devices, initial_weights, sizes):
        for name, value in serial.items():
            assert torch.equal(weights[name], value), name
    assert serial["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert serial["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.1)  # 0.02/sqrt(2·2 layers)
