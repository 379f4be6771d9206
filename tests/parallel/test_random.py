"""Random numbers depend only on their global position: a shard has the bits of its slice of the global tensor."""

import hashlib

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel import random
from tests.support.grids import TINY_MODEL, build_model, full, global_tensor


def whole_of(shape):
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((37, 3, 29), (slice(5, 20), slice(0, 3), slice(7, 11))),
        ((37, 3, 29), (slice(36, 37), slice(1, 2), slice(0, 29))),
        ((50, 20), (slice(0, 50), slice(0, 20))),
        ((6, 10), (slice(2, 5), slice(3, 8))),
        ((6, 10), (slice(2, 2), slice(3, 8))),
        ((6, 10), (slice(2, 5), slice(8, 8))),
        ((25,), (slice(9, 24),)),
        ((7, 1), (slice(3, 6), slice(0, 1))),
        ((1,), (slice(0, 1),)),
        ((), ()),
        ((3, 2, 4, 5), (slice(1, 2), slice(1, 2), slice(1, 4), slice(1, 5))),
    ],
    ids=str,
)
def test_any_part_of_a_normal_tensor_equals_that_part_of_the_whole_for_any_chunk_size(shape, part, monkeypatch):
    key = random.key(0, "w")
    whole = random.normal(key, shape, whole_of(shape))
    assert whole.shape == shape
    for chunk in (random.CPU_CHUNK, 1, 60):
        monkeypatch.setattr(random, "CPU_CHUNK", chunk)
        assert torch.equal(random.normal(key, shape, part), whole[part])


def test_normal_numbers_have_the_recorded_bits():
    values = random.normal(random.key(0, "w"), (1000, 2001), (slice(0, 1000), slice(1, 2001)))
    assert hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest() == "ac974ed6b4b081de"


def test_rows_of_normal_numbers_depend_on_their_keys_only(monkeypatch):
    keys = random.fold(random.key(0, "w"), torch.arange(50))
    rows = random.normal_rows(keys, 21)
    assert torch.equal(rows, random.normal(random.key(0, "w"), (50, 21), whole_of((50, 21))))
    some = torch.tensor([7, 49, 7, 0])
    monkeypatch.setattr(random, "CPU_CHUNK", 30)
    assert torch.equal(random.normal_rows(keys[some], 21), rows[some])
    assert torch.equal(random.normal_rows(keys, 5), rows[:, :5])


@pytest.mark.parametrize("bound", [1, 7, 1000, 2**31])
def test_integers_are_uniform_and_depend_on_their_keys_only(bound):
    keys = random.fold(random.key(0, "t"), torch.arange(70_000))
    before = keys.clone()
    values = random.integers(keys, bound)
    assert torch.equal(keys, before) and torch.equal(random.integers(keys[30:40], bound), values[30:40])
    assert values.dtype == torch.int64 and values.min() >= 0 and values.max() < bound
    counts = (values // (bound / min(bound, 7))).long().bincount()
    assert len(counts) == min(bound, 7)
    assert (counts - 70_000 / len(counts)).abs().max() < 5 * 10_000**0.5
    if bound == 7:  # not a function of the numbers that the same keys give
        correlations = torch.corrcoef(torch.cat([values[None], random.normal_rows(keys, 4).T]).double())
        assert (correlations[0, 1:].abs() < 5 / 70_000**0.5).all()


def test_the_intervals_have_the_moments_of_the_normal_distribution():
    center, width = (table.double() for table in random.intervals(torch.device("cpu")))
    places = 2**16
    assert torch.equal(center, -center.flip(0)) and torch.equal(width, width.flip(0))  # odd moments are zero
    square = (places**2 - 1) / 12  # moments of a place's distance from the center
    fourth = square * (3 * places**2 - 7) / 20
    variance = (center**2 + width**2 * square).mean().item()
    kurtosis = (center**4 + 6 * center**2 * width**2 * square + width**4 * fourth).mean().item() / variance**2
    assert variance == pytest.approx(1, abs=1e-5) and kurtosis == pytest.approx(3, abs=1e-5)
    # Neighboring intervals touch, up to rounding.
    gaps = (center + width * places / 2)[:-1] - (center - width * places / 2)[1:]
    assert gaps.abs().max() < 1e-6


def test_normal_numbers_are_normal_and_keys_give_independent_ones():
    shape = (1000, 400)
    values = random.normal(random.key(0, "a"), shape, whole_of(shape)).double()
    n = values.numel()
    moments = [values.pow(power).mean().item() for power in (1, 2, 3, 4)]
    # Five standard errors of each moment of a standard normal.
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert moment == pytest.approx(expected, abs=5 * (variance / n) ** 0.5)
    # Kolmogorov-Smirnov: the largest distance of the distribution functions exceeds 2.2/√n with probability 1e-4.
    distances = torch.special.ndtr(values.flatten().sort().values) - (torch.arange(n) + 0.5) / n
    assert distances.abs().max() < 2.2 / n**0.5
    for lag in (1, 2, 399, 400, 401):
        correlation = (values.flatten()[lag:] * values.flatten()[:-lag]).mean().item()
        assert abs(correlation) < 5 / n**0.5
    other_values = random.normal(random.key(1, "a"), shape, whole_of(shape)).double()
    assert abs((values * other_values).mean().item()) < 5 / n**0.5


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_dropout_rate_holds_in_every_row_and_column(drop):
    rows = random.fold(random.key(3, "d"), torch.arange(600))
    keep = random.keep_mask(rows, 500, 0, drop)
    bound = 5.5 * (drop * (1 - drop)) ** 0.5  # standard errors; there are 1,100 rows and columns
    assert abs(keep.double().mean() - (1 - drop)) < bound / keep.numel() ** 0.5
    assert (keep.double().mean(0) - (1 - drop)).abs().max() < bound / 600**0.5
    assert (keep.double().mean(1) - (1 - drop)).abs().max() < bound / 500**0.5


def initial_weights(sizes):
    model = build_model(TINY_MODEL, sizes, torch.float32)
    grid = model.context.grid
    return {name: global_tensor(p, p.spec, grid) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2, 1), (1, 3, 1, 1), full((4, 1, 1, 2)), full((1, 2, 4, 1)), full((2, 2, 2, 2))], ids=str
)
def test_initial_weights_are_bit_equal_on_every_grid(ranks, sizes):
    sizes = GridSizes(*sizes)
    (serial,) = ranks.run(1, initial_weights, GridSizes())
    for weights in ranks.run(sizes.devices, initial_weights, sizes):
        for name, value in serial.items():
            assert torch.equal(weights[name], value), name
    assert serial["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert serial["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.1)  # 0.02/sqrt(2·2 layers)


def test_a_gpu_hashes_the_mask_of_gpt_125m_at_once(monkeypatch):
    """A device without values stands for the GPU."""
    monkeypatch.setattr(torch, "ge", None)  # it computes parts of a mask
    mask = random.keep_mask(torch.empty(32 * 1024, dtype=torch.int64, device="meta"), 768, 0, 0.1)
    assert mask.shape == (32 * 1024, 768)


@pytest.mark.parametrize(("offset", "columns"), [(0, 30), (6, 6), (3, 11), (29, 1)])
def test_any_columns_of_a_mask_have_the_bits_of_the_whole_in_one_kernel_and_in_parts(offset, columns, monkeypatch):
    rows = random.fold(random.key(3, "d"), torch.arange(12).view(3, 4))
    expected = random.keep_mask(rows, 30, 0, 0.3)[..., offset : offset + columns]
    assert torch.equal(random.keep_mask(rows, columns, offset, 0.3), expected)
    monkeypatch.setattr(random, "MASK_CHUNK", 20)
    assert torch.equal(random.keep_mask(rows, columns, offset, 0.3), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(random.keep_mask(rows, columns, offset, 0.3), expected)
