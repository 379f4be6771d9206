"""Sample i of a run is a function of (seed, i): each sequence once an epoch, in an order that has no memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt4d.data.sampler import Sequences, permuted


@given(st.integers(1, 300), st.integers(0, 2**31))
def test_permuted_is_a_permutation(size, seed):
    assert sorted(permuted(i, size, seed) for i in range(size)) == list(range(size))


def test_an_order_is_neither_the_files_nor_another_seeds_or_epochs():
    orders = [[permuted(i, 1000, *key) for i in range(1000)] for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15
        assert sum(a == b for a, b in zip(order, range(1000), strict=True)) < 12
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_has_every_sequence_once_and_targets_are_the_next_tokens(shuffle):
    tokens = np.arange(100, dtype=np.uint16)
    data = Sequences(tokens, length=7, seed=3, shuffle=shuffle)
    assert data.count == 14  # 99 tokens have a next one
    for epoch in range(2):
        ids, targets, numbers = data.batch(epoch * 14, 14)
        assert sorted(ids[:, 0].tolist()) == list(range(0, 98, 7))
        assert (targets == ids + 1).all()
        assert numbers.tolist() == list(range(epoch * 14, epoch * 14 + 14))


def test_a_batch_is_the_same_in_parts():
    data = Sequences(np.arange(1000, dtype=np.uint16), length=9, seed=0, shuffle=True)
    whole, _, _ = data.batch(5, 12)
    parts = [data.batch(5 + start, 4)[0] for start in (0, 4, 8)]
    assert np.array_equal(whole, np.concatenate(parts))
