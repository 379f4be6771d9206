"""The samples a rank reads depend on its shard alone, not on microbatches or threads."""

import threading

import numpy as np
import pytest
import torch

from gpt4d.data.images import ImageSamples
from gpt4d.data.loader import Loader
from gpt4d.data.sampler import Sequences
from tests.support.data_files import in_parts

CPU = torch.device("cpu")


def data():
    return Sequences(in_parts(1000), length=5, seed=2, shuffle=True)


def whole_rows(first, size):
    """Return the rows of ``size`` samples from ``first`` on."""
    return torch.from_numpy(data().rows(np.arange(first, first + size)))


@pytest.mark.parametrize(("workers", "shards", "micro"), [(0, 1, None), (0, 4, 2), (1, 2, 1), (3, 4, None), (3, 4, 2)])
def test_shards_microbatches_and_workers_do_not_change_the_batch(workers, shards, micro):
    for first in (0, 24, 8):  # 8 is not the step that was read ahead
        by_shard = []
        for shard in range(shards):
            loader = Loader(data(), 8, shard, shards, micro, CPU, workers)
            list(loader.step(max(0, first - 8)))
            by_shard.append(list(loader.step(first)))
            loader.close()
        # A microbatch is a part of the global batch, of which each shard has a part.
        rows, sample_ids = zip(*[part for parts in zip(*by_shard, strict=True) for part in parts], strict=True)
        assert torch.equal(torch.cat(rows), whole_rows(first, 8))
        assert torch.cat(sample_ids).tolist() == list(range(first, first + 8))
    loader = Loader(data(), 8, 0, 1, None, CPU, workers)
    for first in (16, 24, 32):
        ((rows, _),) = loader.step(first)
        assert torch.equal(rows, whole_rows(first, 8))
    loader.close()


def test_a_rank_that_needs_no_rows_reads_none_and_has_the_same_samples():
    sequences = data()
    expected = list(Loader(sequences, 8, 1, 2, 2, CPU, workers=0).step(16))
    sequences.rows = None
    loaded = list(Loader(sequences, 8, 1, 2, 2, CPU, workers=1, reads=False).step(16))
    assert [sample_ids.tolist() for _, sample_ids in loaded] == [sample_ids.tolist() for _, sample_ids in expected]
    assert [rows.shape for rows, _ in loaded] == [rows.shape for rows, _ in expected]
    assert not any(rows.any() for rows, _ in loaded)


def test_rows_of_several_dims_are_loaded_as_they_are():
    array = np.random.default_rng(0).integers(0, 256, (20, 3, 4, 2), np.uint8)
    loader = Loader(ImageSamples(array, seed=2, shuffle=False, flip=False), 4, 1, 2, 1, CPU, workers=1)
    rows, sample_ids = zip(*loader.step(8), strict=True)
    assert torch.equal(torch.cat(rows), torch.from_numpy(array[[9, 11]])) and rows[0].dtype == torch.uint8
    assert torch.cat(sample_ids).tolist() == [9, 11]
    loader.close()


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
