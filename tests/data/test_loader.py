"""The samples a rank reads depend on its shard alone, not on microbatches or threads."""

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
def test_shards_microbatches_and_workers_do_not_change_the_batch(workers, shards, micro):
    for first in (0, 24, 8):  # 8 is not the step that was read ahead
        by_shard = []
        for shard in range(shards):
            loader = Loader(data(), 8, shard, shards, micro, CPU, workers)
            list(loader.step(max(0, first - 8)))
            by_shard.append(list(loader.step(first)))
            loader.close()
        # A microbatch is a part of the global batch, of which each shard has a part.
        microbatches = [part for parts in zip(*by_shard, strict=True) for part in parts]
        ids, targets = batch(data(), first, 8)
        assert torch.equal(torch.cat([part.inputs["ids"] for part in microbatches]), ids)
        assert torch.equal(torch.cat([part.targets for part in microbatches]), targets)
        assert torch.cat([part.sample_ids for part in microbatches]).tolist() == list(range(first, first + 8))
    loader = Loader(data(), 8, 0, 1, None, CPU, workers)
    for first in (16, 24, 32):
        (loaded,) = loader.step(first)
        ids, targets = batch(data(), first, 8)
        assert torch.equal(loaded.inputs["ids"], ids) and torch.equal(loaded.targets, targets)
    loader.close()


def test_a_rank_that_needs_no_tokens_reads_none_and_has_the_same_samples():
    sequences = data()
    expected = list(Loader(sequences, 8, 1, 2, 2, CPU, workers=0).step(16))
    sequences.rows = None
    loaded = list(Loader(sequences, 8, 1, 2, 2, CPU, workers=1, reads=False).step(16))
    assert [part.sample_ids.tolist() for part in loaded] == [part.sample_ids.tolist() for part in expected]
    assert [part.targets.shape for part in loaded] == [part.targets.shape for part in expected]
    assert not any(part.inputs["ids"].any() for part in loaded)


def test_the_next_step_is_read_ahead():
    read, sequences = threading.Event(), data()
    rows = sequences.rows

    def watched_rows(sample_ids):
        if 15 in sample_ids:
            read.set()
        return rows(sample_ids)

    sequences.rows = watched_rows
    loader = Loader(sequences, 8, 0, 1, None, CPU, workers=1)
    next(loader.step(0))
    assert read.wait(60)
    before = loader.waited_s
    list(loader.step(8))
    assert loader.waited_s >= before > 0
    loader.close()


def test_an_error_while_reading_ahead_is_raised_by_the_step_that_needs_it():
    sequences = data()
    rows = sequences.rows

    def failing_rows(sample_ids):
        if 8 in sample_ids:
            raise OSError("the disk is gone")
        return rows(sample_ids)

    sequences.rows = failing_rows
    loader = Loader(sequences, 8, 0, 1, None, CPU, workers=1)
    list(loader.step(0))
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader.step(8))
    loader.close()
