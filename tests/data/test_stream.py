"""Text that is tokenized while a run trains: the samples and losses of prepared token files, from any position."""

import functools
import glob
import itertools
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from gpt4d.config import DataConfig
from gpt4d.data import documents, stream
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.preparation import Encoding
from gpt4d.data.sampler import Sequences
from gpt4d.data.stream import Stream
from gpt4d.runtime.errors import RankError
from gpt4d.validation import validate
from tests.support.data_files import one_line
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.jobs import LaunchedJob
from tests.support.rank_pool import RankFailure
from tests.support.settings import configured

LENGTH, BLOCK = 16, 9


@pytest.fixture
def text(small) -> tuple[DataConfig, Encoding, Sequences]:
    """Return the settings of the small corpus, how it is tokenized, and the sequences of its prepared token files."""
    files = prepared(small).first
    encoding = Encoding(files.directory / "tokenizer.json", files.end_of_text, files.header["dtype"], 0.2)
    return small, encoding, Sequences(files.tokens("train"), LENGTH, seed=0, shuffle=False)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", BLOCK)


def opened(config, encoding, shuffle=False, length=LENGTH) -> Stream:
    return Stream(documents.readers(config, documents.files(config)), encoding, length, 0, shuffle)


def test_a_stream_has_the_sequences_of_prepared_tokens_in_each_epoch(text):
    config, encoding, sequences = text
    ids = np.arange(2 * sequences.count + 5)
    assert sequences.count % BLOCK, "the end of an epoch is within a block"
    rows = opened(config, encoding).rows(ids)
    assert rows.dtype == sequences.dtype and np.array_equal(rows, sequences.rows(ids))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_continues_from_the_position_of_any_sample(text, shuffle):
    config, encoding, sequences = text
    ids = np.arange(2 * sequences.count)
    complete = opened(config, encoding, shuffle)
    expected = complete.rows(ids)
    for some in ([100, 3, 50], [7, 8], [0], [sequences.count], [99, 101]):
        assert np.array_equal(complete.rows(np.array(some)), expected[some]), "in any order"
    for first in (1, 8, 77, sequences.count - 1, sequences.count, sequences.count + 30):
        position = opened(config, encoding, shuffle).position(first)
        assert position == complete.position(first)
        data = opened(config, encoding, shuffle)
        data.seek(first, position)
        assert np.array_equal(data.rows(ids[first:]), expected[first:])


def test_a_stream_reads_no_file_before_its_position(text):
    config, encoding, sequences = text
    readers = documents.readers(config, documents.files(config))
    read = []

    def recorded(number):
        return lambda: (read.append(number), readers[number]())[1]

    data = Stream([recorded(number) for number in range(len(readers))], encoding, LENGTH, 0, False)
    last = sequences.count - 1
    position = data.position(last)
    read.clear()
    data.seek(last, position)
    data.rows(np.array([last]))
    assert position.file > 20 and min(read[: len(readers) - position.file]) == position.file


def test_a_shuffled_stream_permutes_each_block(text):
    config, encoding, sequences = text
    ids = np.arange(BLOCK * 10)
    rows = opened(config, encoding, shuffle=True).rows(ids)
    expected = sequences.rows(ids)
    assert not np.array_equal(rows, expected)
    for block in np.split(ids, 10):
        assert sorted(rows[block].tolist()) == sorted(expected[block].tolist())


def test_a_text_shorter_than_a_sequence_is_an_error_in_every_call(text):
    config, encoding, _ = text
    data = opened(config, encoding, length=10**6)
    for _ in range(2):
        with pytest.raises(RankError, match=r"train\.seq_len=1000000: a sequence takes 1000001 tokens, and"):
            data.rows(np.array([0]))


def train_in_small_blocks(config):
    with mock.patch.object(stream, "BLOCK", 24):
        train_in_rank(config)


@pytest.fixture
def configure(tiny, tmp_path):
    """Return a function to the configuration of a run on a grid in a directory."""
    tokenizer = prepared(tiny().data).first.directory
    common = [f"data.tokenizer={tokenizer}", "train.validation_batches=2", "optim.schedule_steps=20"]

    def of(name, grid, *overrides):
        axes = [f"parallel.{axis}={size}" for axis, size in zip(("gx", "gy", "gz", "gdata"), grid, strict=True)]
        return tiny(*common, f"run.dir={tmp_path / name}", *axes, *overrides)

    return of


@pytest.fixture
def run(ranks, configure, tmp_path):
    """Return a function that trains on a grid in a directory, and returns the losses of its steps and validations."""

    def train(name, *overrides, grid=(1, 1, 1, 1)):
        config = configure(name, grid, "train.validate_every=4", *overrides)
        ranks.run(int(np.prod(grid)), train_in_small_blocks, config)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        validation = [line["loss"] for line in lines if line.get("event") == "validation"]
        return [line["loss"] for line in metric_lines(tmp_path / name)], validation

    return train


STREAM = "data.stream=true"


@pytest.mark.parametrize("grid", [full((1, 1, 1, 1)), (1, 1, 1, 2), full((2, 1, 1, 2))])
def test_losses_equal_those_of_prepared_tokens_in_the_order_of_the_files(run, grid):
    order = "data.shuffle=false", "train.steps=10", "train.batch_size=48"  # 480 sequences, more than an epoch
    expected = run("prepared", *order, grid=grid)
    assert run("stream", *order, STREAM, grid=grid) == expected and len({*expected[0]}) == 10


@pytest.mark.parametrize(
    "grids",
    [
        full(((1, 1, 1, 1), (1, 1, 1, 1))),
        ((1, 1, 1, 2), (2, 1, 1, 1)),
        full(((2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 2, 2), (1, 1, 1, 1), (1, 1, 1, 4))),
    ],
    ids=str,
)
def test_a_stopped_run_continues_on_other_grids_with_the_samples_of_a_straight_run(run, grids, tmp_path):
    every = STREAM, "train.validate_every=2"
    losses, validation = run("straight", *every, f"train.steps={4 * len(grids)}")
    for number, grid in enumerate(grids, 1):
        resumed = run("resumed", *every, f"train.steps={4 * number}", grid=grid)
    rel = 0 if {*grids} == {(1, 1, 1, 1)} else 1e-5
    assert resumed[0] == pytest.approx(losses, rel=rel, abs=0)
    assert resumed[1] == pytest.approx(validation, rel=rel, abs=0)
    meta = json.loads((tmp_path / f"resumed/checkpoints/step_{4 * number:08}/meta.json").read_text())
    assert meta["position"]["file"] > 0


def kill_in_a_step(step, calls, rank):
    """Read small blocks. Kill rank 0 in or after ``step``, at the given number of function calls of its main thread."""
    from gpt4d.training.trainer import Trainer

    stream.BLOCK = 24
    original, remaining = Trainer.step, itertools.count(calls, -1)

    def count(frame, event, argument):
        if event == "call" and not next(remaining):
            os.kill(os.getpid(), signal.SIGKILL)

    def step_and_count(self, stop):
        if self.progress.step + 1 == step:
            sys.setprofile(count)
        return original(self, stop)

    if not rank:
        Trainer.step = step_and_count


@pytest.mark.full
def test_a_run_killed_at_random_points_of_its_steps_has_the_losses_of_a_straight_run(ranks, configure, run):
    expected, _ = run("straight", STREAM, "train.steps=30", "train.validate_every=0")  # 480 sequences: over an epoch
    draw = random.Random(0)
    grids = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (2, 1, 1, 2), (1, 1, 2, 1)]
    kills = sorted(draw.sample(range(3, 30), len(grids) - 1))
    lines = []
    for grid, step in zip(grids, [*kills, None], strict=True):
        saves = "checkpoint.every=2", "checkpoint.async_save=false"
        config = configure("killed", grid, STREAM, "train.steps=30", *saves)
        act = functools.partial(kill_in_a_step, step, draw.randrange(1, 2000))
        with LaunchedJob(ranks.context, config, int(np.prod(grid)), act) as job:
            assert job.exit_code(0) == (-signal.SIGKILL if step else 0), job.outputs()
        lines += [line for line in job.metric_lines() if "event" not in line and line not in lines]
    assert len(lines) > 30, "no step was computed twice"
    assert {line["step"] for line in lines} == {*range(1, 31)}
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"] - 1], rel=1e-5)
    resumed = [line["step"] for line in job.metric_lines() if line.get("event") == "resume"]
    assert len(resumed) == len(kills) and all(0 < kill - at <= 3 for kill, at in zip(kills, resumed, strict=True))


def test_a_resume_refuses_a_changed_file_and_can_be_told_to_read_it_from_the_beginning(run, corpus, tmp_path):
    for path in map(Path, glob.glob(corpus)):
        shutil.copy(path, tmp_path)
    own = f"data.path={tmp_path}/*.txt", STREAM
    run("a", *own, "train.steps=2")
    with open(tmp_path / "31.txt", "a") as file:
        file.write("more")
    with pytest.raises(RankFailure, match=r"was trained with other samples; use data with the same samples"):
        run("a", *own, "train.steps=4")
    assert len(run("a", *own, "train.steps=4", "checkpoint.allow_changes=[data]")[0]) == 4


def test_a_row_that_cannot_be_read_ends_the_run_with_its_file_and_line(run, tmp_path):
    rows = [json.dumps({"text": f"alpha beta {number} " * 20}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{"]))
    own = "data=jsonl", f"data.path={tmp_path}/a.jsonl", STREAM, "data.name=rows"
    with pytest.raises(RankFailure, match=r"a\.jsonl:41: invalid JSON"):
        run("a", *own, "data.validation_fraction=0", "train.validation_batches=0", "train.validate_every=0")


def test_settings_that_a_stream_cannot_have_are_one_line():
    for words, message in (
        ("data=sotu", "data.tokenizer=null: data.stream=true trains no tokenizer"),
        ("data=sotu data.tokenizer=gpt2 data.workers=2", "data.workers=2: one thread reads with"),
        ("data=sotu data.tokenizer=gpt2 train.epochs=2", "train.epochs=2.0: data.stream=true does not know"),
        ("data=tokens data.path=.", "data.stream=true: data.source=tokens has tokens already; leave it out"),
    ):
        with one_line(f"^{message}"):
            validate(configured(["model.vocab_size=50257", STREAM, *words.split()]), 1)
