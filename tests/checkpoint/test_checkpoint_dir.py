"""Listing and selection of a run's checkpoints, their metadata, and whether a run fits them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import ConfigError
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from tests.support.checkpoints import meta, save_steps
from tests.support.commands import wrong_messages
from tests.support.grids import train_in_rank
from tests.support.settings import configured


def candidate_names(resume, run_dir):
    return [checkpoint.path.name for checkpoint in checkpoint_dir.resume_candidates(resume, run_dir)]


def write_meta(directory, written=None, **changes):
    """Write the metadata of a checkpoint, with changed values."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meta.json").write_bytes(replace(written or meta(5), **changes).to_json())


def test_leftovers_are_never_selected_and_removed_by_the_next_save(ranks, tmp_path):
    save_steps(ranks, tmp_path, (1, 2))
    checkpoints = tmp_path / "checkpoints"
    for name in ("step_00000003.partial", "step_00000004.removed", "step_00000005.damaged"):
        (checkpoints / name).mkdir()
    assert candidate_names("auto", tmp_path) == ["step_00000002", "step_00000001"]
    assert save_steps(ranks, tmp_path, (6,)) == ["step_00000002", "step_00000006"]


def test_resume_selects_checkpoints_newest_first(ranks, tmp_path):
    assert candidate_names("auto", tmp_path) == [] == candidate_names("never", tmp_path)
    save_steps(ranks, tmp_path, (2, 11))
    elsewhere, older = tmp_path / "elsewhere", tmp_path / "checkpoints" / "step_00000002"
    assert candidate_names(str(tmp_path), elsewhere) == ["step_00000011"]
    assert checkpoint_dir.resume_candidates(str(older), elsewhere) == [Checkpoint(older)]
    assert candidate_names(str(tmp_path), tmp_path) == ["step_00000011"]
    for resume in ("never", str(older)):  # Retention removes checkpoints older than the existing ones.
        with pytest.raises(ConfigError, match=r"set another run\.name"):
            checkpoint_dir.resume_candidates(resume, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"format": 6}', "[" * 100_000])
def test_invalid_meta_is_damaged(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(Damaged, match=r"meta\.json: damaged"):
        checkpoint_dir.Meta.read(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 3}, "format 3, but this version reads format 6; use the version"),
        ({"format": 99}, "format 99, but this version reads format 6; use the version"),
        ({"family": "other"}, "model family 'other' is unknown"),
    ],
)
def test_another_format_or_family_is_rejected_but_not_damaged(tmp_path, values, message):
    (tmp_path / "meta.json").write_text(json.dumps({**json.loads(meta(5).to_json()), **values}))
    with pytest.raises(ConfigError, match=message) as raised:
        checkpoint_dir.Meta.read(tmp_path)
    assert not isinstance(raised.value, Damaged)


def test_meta_is_read_as_written(tmp_path):
    written = meta(5, registry.get("gpt2").config(dropout=0.25, vocab_size=300))
    write_meta(tmp_path, written)
    assert checkpoint_dir.Meta.read(Path(tmp_path)) == written


def test_task_and_data_must_agree_except_for_the_name(tmp_path):
    def check(identity, allowed=(), task="language_modeling"):
        Checkpoint(tmp_path).check_task(task, identity, allowed=allowed)

    write_meta(tmp_path)
    check({"tokenizer": "abc", "data": "letters"})
    tokenizer = "was trained with another tokenizer; use data with"
    cases = [
        ({"tokenizer": "abd", "data": "books"}, (), "language_modeling", "^data=books: "),
        ({"tokenizer": "abd", "data": "books"}, (), "language_modeling", tokenizer),
        ({"data": "books"}, (), "language_modeling", tokenizer),
        ({"tokenizer": "abc"}, (), "images", "^task=images: "),
        ({"tokenizer": "abc"}, (), "images", " was trained for language_modeling; use a model for"),
    ]
    assert not wrong_messages(cases, check)
    other = {"tokenizer": "abc", "samples": "y", "data": "letters"}
    write_meta(tmp_path, grids=[])
    check(other)  # an imported model has no samples
    write_meta(tmp_path, grids=[], identity={"data": "x"})
    check(other)  # nor a tokenizer with tokenizer=none
    write_meta(tmp_path, identity={"tokenizer": "abc", "samples": "x", "data": "letters"})
    with pytest.raises(ConfigError, match=r"with other samples; .*checkpoint\.allow_changes=\[data\]"):
        check(other)
    check(other, ["data"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        check(other | {"tokenizer": "abd"}, ["data"])


def test_first_readable_checkpoint_decides_whether_the_run_fits(tmp_path):
    for step, settings in ((4, {"optim.lr": 7.0}), (5, {"optim.lr": 0.5, "train.seed": 3})):
        directory = tmp_path / "checkpoints" / checkpoint_dir.name(step)
        write_meta(directory, meta(step, GPT2Config(vocab_size=4096)), settings=settings)
    (tmp_path / "checkpoints" / checkpoint_dir.name(6)).mkdir()  # without a meta.json: damaged
    config = configured(["model=gpt_tiny", f"run.dir={tmp_path}", "optim.lr=0.5", "train.seed=3"])
    assert checkpoint_dir.check_run(config) == {}
    config.optim.lr = 0.25
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.25: .*step_00000005 has 0\.5; restore the old value, set"):
        checkpoint_dir.check_run(config)
    config.checkpoint.allow_changes = ["optim"]
    assert checkpoint_dir.check_run(config) == {"optim.lr": (0.5, 0.25)}
    config.model.layers = 1
    with pytest.raises(ConfigError, match=r"model\.layers=1: the checkpoint .*step_00000005 has 4"):
        checkpoint_dir.check_run(config)


def count_parsed_files(config):
    """Check and resume a run on a rank. Returns how often each file of a checkpoint was parsed, by ``check_run`` first.

    A file is recognized by the keys of its value.
    """
    keys = {"meta": {"format", "progress"}, "manifest": {"files", "xxh3_128"}, "index": {"model.tokens.weight"}}
    counts, loads = [Counter(), Counter()], json.loads

    def count_and_parse(*args, **kwargs):
        value = loads(*args, **kwargs)
        counts[-1].update(name for name in keys if isinstance(value, dict) and keys[name] <= value.keys())
        return value

    with mock.patch("json.loads", count_and_parse):
        checkpoint_dir.check_run(config)
        checked = counts.pop()
        train_in_rank(config)
    return checked, counts[0]


def test_each_file_of_a_checkpoint_is_parsed_once_per_resume(ranks, tiny):
    ranks.run(2, train_in_rank, tiny("train.steps=1", "parallel.gz=2"))
    counts = ranks.run(2, count_parsed_files, tiny("train.steps=2", "parallel.gz=2"))
    assert counts == [({"meta": 1}, {"meta": 1, "manifest": 1, "index": 1})] * 2
