"""A run verifies its token files before the first step, and once."""

import itertools
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from gpt4d.config import ConfigError
from gpt4d.data import corpus, prepare, tokens
from gpt4d.runtime.consensus import all_gather_json
from tests.support.data_files import flip_bit
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


@pytest.fixture
def files(small, tmp_path):
    """Return the token files of the small corpus."""
    return prepare.prepare(small, tmp_path / "tokens").entries()


def names_read(files, run_dir):
    """Return the names of the files that each rank reads to verify ``files``."""
    names = []
    original = tokens.check_content
    tokens.check_content = lambda share: (names.extend(path.name for path, _ in share), original(share))[1]
    try:
        corpus.verify(files, run_dir)
    except ConfigError as error:
        return all_gather_json(f"{dist.get_rank()}: {error}", "test")
    finally:
        tokens.check_content = original
    return all_gather_json(names, "test")


def read(ranks, files, run_dir):
    return ranks.run(2, names_read, files, run_dir)[0]


def test_ranks_share_the_files_and_read_only_files_that_have_changed(ranks, files, tmp_path):
    everything = sorted(path.name for path, _ in files)
    first, second = read(ranks, files, tmp_path)
    assert first and second and sorted([*first, *second]) == everything
    assert read(ranks, files, tmp_path) == [[], []]
    path = files[0][0]
    os.utime(path, ns=(0, 0))
    assert read(ranks, files, tmp_path) == [[path.name], []]
    (tmp_path / corpus.FILE).write_text("[1")
    assert sorted(itertools.chain(*read(ranks, files, tmp_path))) == everything


def test_damage_is_reported_on_every_rank_and_not_remembered(ranks, files, tmp_path):
    for path, _ in files:
        if path.name == "train_00000.tokens":
            flip_bit(path)
    for _ in range(2):
        errors = read(ranks, files, tmp_path)
        assert all("train_00000.tokens: damaged, the checksum differs; prepare" in error for error in errors)
    assert not (tmp_path / corpus.FILE).exists()


def test_a_damaged_file_of_equal_size_ends_a_run_before_its_first_step(ranks, tiny, tmp_path):
    cache = f"data.cache_dir={tmp_path / 'own-cache'}"
    config = tiny(cache, "train.steps=2", "checkpoint.every=1")
    ranks.run(2, train_in_rank, config)
    assert (Path(config.run.dir) / corpus.FILE).exists()
    (path,) = (tmp_path / "own-cache").rglob("train_00000.tokens")
    flip_bit(path)
    for run_dir in (config.run.dir, f"{config.run.dir}-new"):
        with pytest.raises(RankFailure, match=r"train_00000\.tokens: damaged, the checksum differs"):
            ranks.run(2, train_in_rank, tiny(cache, "train.steps=4", f"run.dir={run_dir}"))
    assert [line["step"] for line in metric_lines(config.run.dir)] == [1, 2]
