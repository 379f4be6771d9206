"""Sample i of a run is a function of (seed, i), and every epoch has each sequence once."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.config import ConfigError
from gpt4d.data import sampler
from gpt4d.data.sampler import Blend, Sequences, integer_shares, permute
from gpt4d.data.tokens import Tokens
from tests.support.data_files import batch, in_parts


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_permute_is_a_permutation(size, seed):
    assert sorted(permute(np.arange(size), size, seed).tolist()) == list(range(size))


def test_the_order_differs_from_the_files_and_between_seeds_and_epochs():
    orders = [permute(np.arange(1000), 1000, *key).tolist() for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15
        assert sum(a == b for a, b in zip(order, range(1000), strict=True)) < 12
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_have_every_sequence_once_and_targets_are_next_tokens(shuffle):
    data = Sequences(in_parts(100), length=7, seed=3, shuffle=shuffle)
    assert data.count == 14  # 99 tokens have a successor
    for epoch in range(2):
        ids, targets = batch(data, epoch * 14, 14)
        assert sorted(ids[:, 0].tolist()) == list(range(0, 98, 7))
        assert (targets == ids + 1).all()


@pytest.mark.parametrize("block", [1, 8, 100])
def test_the_block_size_does_not_change_the_order(monkeypatch, block):
    data = Sequences(in_parts(1000), length=7, seed=3, shuffle=True)
    first, second = (data.positions(np.arange(data.count) + epoch * data.count) for epoch in (0, 1))
    assert sorted(first) == sorted(second) and (first != second).mean() > 0.9, "each epoch has an order of its own"
    expected = data.rows(np.arange(300))
    monkeypatch.setattr(sampler, "BLOCK", block)
    data = Sequences(in_parts(1000), length=7, seed=3, shuffle=True)
    for first in range(0, 300, 20):
        assert np.array_equal(data.rows(np.arange(first, first + 20)), expected[first : first + 20])


def test_a_corpus_of_one_sequence_is_permuted_once_per_epoch_read(monkeypatch):
    epochs = []
    monkeypatch.setattr(sampler, "permute", lambda indices, size, seed, epoch: epochs.append(epoch) or indices)
    Sequences(in_parts(8), length=7, seed=3, shuffle=True).rows(np.arange(8))
    assert len(epochs) == 8


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_slices_of_tokens_in_parts_are_the_tokens(start, size):
    assert in_parts(50, 7)[start : start + size].tolist() == list(range(50))[start : start + size]


def make_source(token, count):
    tokens = Tokens([np.full(count * 4 + 1, token, np.uint16)], "uint16", [], 2**16)
    return Sequences(tokens, 4, seed=1, shuffle=True)


WEIGHTS = st.lists(st.decimals("0.01", 10, places=2).map(float), min_size=1, max_size=5)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 3000), st.integers(1, 800))
def test_a_blend_matches_its_weights_within_two_in_any_window(weights, first, size):
    blend = Blend([make_source(k, 5) for k in range(len(weights))], [weights])
    drawn = blend.choose(np.arange(first, first + size))[0].tolist()
    total = sum(Fraction(str(weight)) for weight in weights)
    for source, weight in enumerate(weights):
        assert abs(drawn.count(source) - size * Fraction(str(weight)) / total) < 2
    period = int(blend.periods[0])
    drawn = blend.choose(np.arange(period, 2 * period))[0].tolist()
    shares = [period * Fraction(str(weight)) / total for weight in weights]
    assert [drawn.count(source) for source in range(len(weights))] == shares, "a period matches the weights exactly"


def test_weights_are_read_as_exact_decimals():
    assert integer_shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_shares([0.99999, 0.00001]) == [99999, 1]
    assert integer_shares([1, 2.5, 1e-3]) == [1000, 2500, 1]


@pytest.mark.parametrize("weights", [[0.1234567, 0.8765433], [1, 1e-300], [1e300, 1e-300]])
def test_weights_with_a_long_period_are_rejected_with_similar_ones(weights):
    with pytest.raises(ConfigError, match=r"data\.blend: the weights .* more than 100,000 sequences; use") as raised:
        integer_shares(weights)
    similar = [int(share) for share in str(raised.value).rpartition(": ")[2].split(", ")]
    assert integer_shares(similar) == similar
    assert abs(similar[0] / sum(similar) - weights[0] / sum(weights)) < 2e-3


STAGES = st.lists(
    st.tuples(st.integers(0, 200), st.lists(st.sampled_from([0, 0.5, 1, 2, 0.3]), min_size=3, max_size=3))
)


@settings(deadline=None)
@given(st.lists(st.decimals("0.1", 3, places=1).map(float), min_size=3, max_size=3), STAGES, st.integers(1, 500))
def test_a_source_continues_in_each_stage_of_a_blend_after_its_last_sample(weights, later, size):
    """The oracle draws the samples one by one: each stage begins its own blend, and each source counts its samples."""
    later = [(length, stage) for length, stage in later if any(stage)]
    sources = [make_source(k, 5) for k in range(3)]
    lengths, stages = [60, *(length for length, _ in later)], [weights, *(stage for _, stage in later)]
    blend = Blend(sources, stages, [0, *np.cumsum(lengths[:-1]).tolist()])
    expected, taken = [], [0, 0, 0]
    for length, stage in zip([*lengths[:-1], 10**6], stages, strict=True):
        mixture = Blend(sources, [stage])
        for place in range(min(length, size - len(expected))):
            (source,) = mixture.choose(np.array([place]))[0].tolist()
            expected.append((source, taken[source]))
            taken[source] += 1
    assert list(zip(*map(np.ndarray.tolist, blend.choose(np.arange(size))), strict=True)) == expected
    for sample in range(0, size, 37):
        assert tuple(int(each[0]) for each in blend.choose(np.array([sample]))) == expected[sample]


def test_rows_of_a_blend_are_rows_of_its_sources():
    sources = [make_source(7, 5), make_source(8, 9)]
    blend = Blend(sources, [[3.0, 1.0]])
    assert blend.rows(np.arange(8))[:, 0].tolist().count(7) == 6
    assert blend.count == 6  # afterwards the first source starts its next epoch
    for place in range(8):
        (source,), (source_id,) = blend.choose(np.array([place]))
        assert (blend.rows(np.array([place])) == sources[source].rows(np.array([source_id]))).all()


def test_a_blend_has_the_widest_dtype_of_its_sources():
    wide = Sequences(Tokens([np.full(9, 70_000, np.uint32)], "uint32", [], 2**17), 4, seed=0, shuffle=False)
    rows = Blend([make_source(7, 2), wide], [[1.0, 1.0]]).rows(np.arange(4))
    assert sorted(rows[:, 0].tolist()) == [7, 7, 70_000, 70_000]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_across_the_end_of_an_epoch_has_rows_of_both(shuffle):
    data = Sequences(in_parts(100), length=7, seed=3, shuffle=shuffle)
    whole = np.concatenate([data.rows(np.arange(14)), data.rows(np.arange(14, 28))])
    assert np.array_equal(data.rows(np.arange(9, 20)), whole[9:20])
