"""What a rank gets of a batch depends on its shard alone, however it is read."""

import threading

import pytest
import torch

from gpt4d.data.loader import Loader
from gpt4d.data.sampler import Sequences
from tests.data import batch
from tests.data.test_sampler import in_parts

CPU = torch.device("cpu")


def data():
    return Sequences(in_parts(1000), length=5, seed=2, shuffle=True)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(("shards", "micro"), [(1, None), (2, 1), (4, None), (4, 2)])
def test_shards_microbatches_and_workers_deal_out_the_same_batch(workers, shards, micro):
    for first in (0, 24, 8):  # the last: not what was read ahead
        parts = []
        for shard in range(shards):
            loader = Loader(data(), 8, shard, shards, micro, CPU, workers)
            list(loader.step(max(0, first - 8)))
            parts += loader.step(first)
            loader.close()
        ids, targets, numbers = (torch.cat(part) for part in zip(*parts, strict=True))
        expected = batch(data(), first, 8)
        assert numbers.tolist() == list(range(first, first + 8))
        assert torch.equal(ids, expected[0]) and torch.equal(targets, expected[1])
    loader = Loader(data(), 8, 0, 1, None, CPU, workers)
    for first in (16, 24, 32):
        ((ids, targets, _),) = loader.step(first)
        expected = batch(data(), first, 8)
        assert torch.equal(ids, expected[0]) and torch.equal(targets, expected[1])
    loader.close()


def test_the_next_step_is_read_before_it_is_asked_for():
    read, sequences = threading.Event(), data()
    rows = sequences.rows

    def watched(indices):
        if 15 in indices:
            read.set()
        return rows(indices)

    sequences.rows = watched
    loader = Loader(sequences, 8, 0, 1, None, CPU, workers=1)
    next(loader.step(0))
    assert read.wait(60)
    before = loader.waited_s
    list(loader.step(8))
    assert loader.waited_s >= before > 0
    loader.close()


def test_what_fails_while_it_is_read_ahead_is_told_when_it_is_needed():
    sequences = data()
    rows = sequences.rows

    def failing(indices):
        if 8 in indices:
            raise OSError("the disk is gone")
        return rows(indices)

    sequences.rows = failing
    loader = Loader(sequences, 8, 0, 1, None, CPU, workers=1)
    list(loader.step(0))
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader.step(8))
    loader.close()
