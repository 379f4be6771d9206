"""Sample i of a run is a function of (seed, i): each sequence once an epoch, in an order that has no memory."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.config import ConfigError
from gpt4d.data import sampler
from gpt4d.data.sampler import Blend, Sequences, permuted, whole_shares
from gpt4d.data.tokens import Tokens
from tests.data import batch


def in_parts(count, size=37):
    """Tokens 0 … in files of several lengths, one of them empty."""
    ids = np.arange(count, dtype=np.uint16)
    cuts = sorted({0, count // 3, *range(0, count, size), count})
    parts = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    return Tokens([*parts[:1], ids[:0], *parts[1:]], "uint16")


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_permuted_is_a_permutation(size, seed):
    assert sorted(permuted(np.arange(size), size, seed).tolist()) == list(range(size))


def test_an_order_is_neither_the_files_nor_another_seeds_or_epochs():
    orders = [permuted(np.arange(1000), 1000, *key).tolist() for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15
        assert sum(a == b for a, b in zip(order, range(1000), strict=True)) < 12
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_has_every_sequence_once_and_targets_are_the_next_tokens(shuffle):
    data = Sequences(in_parts(100), length=7, seed=3, shuffle=shuffle)
    assert data.count == 14  # 99 tokens have a next one
    for epoch in range(2):
        ids, targets = batch(data, epoch * 14, 14)
        assert sorted(ids[:, 0].tolist()) == list(range(0, 98, 7))
        assert (targets == ids + 1).all()


def test_two_epochs_have_different_orders():
    data = Sequences(in_parts(1000), length=7, seed=3, shuffle=True)
    first, second = (data.positions(np.arange(data.count) + epoch * data.count) for epoch in (0, 1))
    assert sorted(first) == sorted(second) and (first != second).mean() > 0.9


@pytest.mark.parametrize("block", [1, 8, 100])
def test_where_a_block_ends_makes_no_difference(monkeypatch, block):
    expected = Sequences(in_parts(1000), length=7, seed=3, shuffle=True).rows(np.arange(300))
    monkeypatch.setattr(sampler, "_BLOCK", block)
    data = Sequences(in_parts(1000), length=7, seed=3, shuffle=True)
    for first in range(0, 300, 20):
        assert np.array_equal(data.rows(np.arange(first, first + 20)), expected[first : first + 20])


def test_a_corpus_of_one_sequence_is_not_permuted_thousands_of_times(monkeypatch):
    epochs = []
    monkeypatch.setattr(sampler, "permuted", lambda indices, size, seed, epoch: epochs.append(epoch) or indices)
    Sequences(in_parts(8), length=7, seed=3, shuffle=True).rows(np.arange(8))
    assert len(epochs) == 8


def test_a_batch_is_the_same_in_parts():
    data = Sequences(in_parts(1000), length=9, seed=0, shuffle=True)
    whole, _ = batch(data, 5, 12)
    parts = [batch(data, 5 + start, 4)[0] for start in (0, 4, 8)]
    assert np.array_equal(whole, np.concatenate(parts))


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_tokens_in_parts_are_the_tokens(start, size):
    assert in_parts(50, 7)[start : start + size].tolist() == list(range(50))[start : start + size]


def of_source(number, count):
    return Sequences(Tokens([np.full(count * 4 + 1, number, np.uint16)], "uint16"), 4, seed=1, shuffle=True)


WEIGHTS = st.lists(st.decimals("0.01", 10, places=2).map(float), min_size=1, max_size=5)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 3000), st.integers(1, 800))
def test_a_blend_has_its_weights_in_any_window(weights, first, size):
    blend = Blend([of_source(k, 5) for k in range(len(weights))], weights)
    drawn = blend.choose(np.arange(first, first + size))[0].tolist()
    total = sum(Fraction(str(weight)) for weight in weights)
    for source, weight in enumerate(weights):
        assert abs(drawn.count(source) - size * Fraction(str(weight)) / total) < 2


@settings(deadline=None)
@given(WEIGHTS)
def test_a_blends_period_has_its_weights_exactly(weights):
    blend = Blend([of_source(k, 5) for k in range(len(weights))], weights)
    drawn = blend.choose(np.arange(blend.period, 2 * blend.period))[0].tolist()
    counts = [drawn.count(source) for source in range(len(weights))]
    assert [count * Fraction(str(weights[0])) for count in counts] == [
        counts[0] * Fraction(str(weight)) for weight in weights
    ]


def test_weights_are_taken_as_they_are_written():
    assert whole_shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_shares([0.99999, 0.00001]) == [99999, 1]
    assert whole_shares([1, 2.5, 1e-3]) == [1000, 2500, 1]


@pytest.mark.parametrize("weights", [[0.1234567, 0.8765433], [1, 1e-300], [1e300, 1e-300]])
def test_weights_that_repeat_too_late_are_refused_with_some_that_would_do(weights):
    with pytest.raises(ConfigError, match=r"data\.blend: the weights .* more than 100,000 sequences; weights") as told:
        whole_shares(weights)
    better = [int(share) for share in str(told.value).rpartition(": ")[2].split(", ")]
    assert whole_shares(better) == better
    assert abs(better[0] / sum(better) - weights[0] / sum(weights)) < 2e-3


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 3000))
def test_a_blend_takes_every_sequence_of_a_source_in_its_order(weights, size):
    blend = Blend([of_source(k, 5) for k in range(len(weights))], weights)
    taken = list(zip(*(part.tolist() for part in blend.choose(np.arange(size))), strict=True))
    for source in range(len(weights)):
        numbers = [number for k, number in taken if k == source]
        assert numbers == list(range(len(numbers)))


def test_a_blends_rows_are_those_of_its_sources():
    sources = [of_source(7, 5), of_source(8, 9)]
    blend = Blend(sources, [3.0, 1.0])
    assert blend.rows(np.arange(8))[:, 0].tolist().count(7) == 6
    assert blend.count == 6  # then the first source begins again
    for place in range(8):
        (source,), (number,) = blend.choose(np.array([place]))
        assert (blend.rows(np.array([place])) == sources[source].rows(np.array([number]))).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_over_the_end_of_an_epoch_has_rows_of_both(shuffle):
    data = Sequences(in_parts(100), length=7, seed=3, shuffle=shuffle)
    whole = np.concatenate([data.rows(np.arange(14)), data.rows(np.arange(14, 28))])
    assert np.array_equal(data.rows(np.arange(9, 20)), whole[9:20])
