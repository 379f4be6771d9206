"""Listing, selection, retention and commit of a run's checkpoints."""

import errno
import io
import json
import os
import re
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, GridSizes, compose
from gpt4d.model import registry
from gpt4d.model.gpt2.config import GPT2Config
from tests.checkpoint import meta, save_state
from tests.rank_pool import RankFailure


def save_steps(ranks, run_dir, steps, keep=2, keep_every=None):
    for step in steps:
        config = {"keep": keep, "keep_every": keep_every}
        ranks.run(1, save_with, run_dir, step, config)
    return [path.name for path in sorted((run_dir / "checkpoints").iterdir())]


def save_with(run_dir, step, config):
    save_state(GridSizes(), False, run_dir, (step,), **config)


def test_newest_checkpoints_and_milestones_are_kept(ranks, tmp_path):
    names = save_steps(ranks, tmp_path, (5, 10, 15, 20, 25), keep=2, keep_every=10)
    assert names == ["step_00000010", "step_00000020", "step_00000025"]
    assert save_steps(ranks, tmp_path, (100_000_000,), keep=1) == ["step_100000000"]


def test_leftovers_are_never_selected_and_removed_by_the_next_save(ranks, tmp_path):
    save_steps(ranks, tmp_path, (1, 2))
    checkpoints = tmp_path / "checkpoints"
    for name in ("step_00000003.partial", "step_00000004.removed", "step_00000005.damaged"):
        (checkpoints / name).mkdir()
    assert [path.name for path in checkpoint_dir.resume_candidates("auto", tmp_path)] == [
        "step_00000002",
        "step_00000001",
    ]
    assert save_steps(ranks, tmp_path, (6,)) == ["step_00000002", "step_00000006"]


def test_resume_selects_checkpoints_newest_first(ranks, tmp_path):
    assert (
        checkpoint_dir.resume_candidates("auto", tmp_path) == [] == checkpoint_dir.resume_candidates("never", tmp_path)
    )
    save_steps(ranks, tmp_path, (2, 11))
    elsewhere, older = tmp_path / "elsewhere", tmp_path / "checkpoints" / "step_00000002"
    assert [path.name for path in checkpoint_dir.resume_candidates(str(tmp_path), elsewhere)] == ["step_00000011"]
    assert checkpoint_dir.resume_candidates(str(older), elsewhere) == [older]
    assert [path.name for path in checkpoint_dir.resume_candidates(str(tmp_path), tmp_path)] == ["step_00000011"]
    for resume in ("never", str(older)):  # The run would write older steps beside newer ones and lose them.
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
    written = meta(5, registry.get("gpt2").config(dropout=0.25))
    (tmp_path / "meta.json").write_bytes(written.to_json())
    assert checkpoint_dir.Meta.read(Path(tmp_path)) == written


def test_task_and_data_must_agree_except_for_the_name(tmp_path):
    (tmp_path / "meta.json").write_bytes(meta(5).to_json())
    checkpoint_dir.check_task(tmp_path, "language_modeling", {"tokenizer": "abc", "data": "letters"})
    for identity in ({"tokenizer": "abd", "data": "books"}, {"data": "books"}):
        with pytest.raises(ConfigError, match=r"data=books: .* was trained with another tokenizer; use data with"):
            checkpoint_dir.check_task(tmp_path, "language_modeling", identity)
    other = {"tokenizer": "abc", "samples": "y", "data": "letters"}
    (tmp_path / "meta.json").write_bytes(replace(meta(5), grids=[]).to_json())
    checkpoint_dir.check_task(tmp_path, "language_modeling", other)  # an imported model has no samples
    (tmp_path / "meta.json").write_bytes(replace(meta(5), grids=[], identity={"data": "x"}).to_json())
    checkpoint_dir.check_task(tmp_path, "language_modeling", other)  # nor a tokenizer with tokenizer=none
    trained = replace(meta(5), identity={"tokenizer": "abc", "samples": "x", "data": "letters"})
    (tmp_path / "meta.json").write_bytes(trained.to_json())
    with pytest.raises(ConfigError, match=r"with other samples; .*checkpoint\.allow_changes=\[data\]"):
        checkpoint_dir.check_task(tmp_path, "language_modeling", other)
    checkpoint_dir.check_task(tmp_path, "language_modeling", other, allowed=["data"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        checkpoint_dir.check_task(tmp_path, "language_modeling", other | {"tokenizer": "abd"}, allowed=["data"])
    with pytest.raises(ConfigError, match=r"task=images: .* was trained for language_modeling; use a model for"):
        checkpoint_dir.check_task(tmp_path, "images", {"tokenizer": "abc"})


def test_first_readable_checkpoint_decides_whether_the_run_fits(tmp_path):
    for step, settings in ((4, {"optim.lr": 7.0}), (5, {"optim.lr": 0.5, "train.seed": 3})):
        directory = tmp_path / "checkpoints" / checkpoint_dir.name(step)
        directory.mkdir(parents=True)
        (directory / "meta.json").write_bytes(replace(meta(step, GPT2Config()), settings=settings).to_json())
    (tmp_path / "checkpoints" / checkpoint_dir.name(6)).mkdir()  # without a meta.json: damaged
    config = compose([f"run.dir={tmp_path}", "optim.lr=0.5", "train.seed=3"])
    assert checkpoint_dir.check_run(config) == {}
    config.optim.lr = 0.25
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.25: .*step_00000005 has 0\.5; restore the old value, set"):
        checkpoint_dir.check_run(config)
    config.checkpoint.allow_changes = ["optim"]
    assert checkpoint_dir.check_run(config) == {"optim.lr": (0.5, 0.25)}
    config.model.layers = 1
    with pytest.raises(ConfigError, match=r"model\.layers=1: the checkpoint .*step_00000005 has 4"):
        checkpoint_dir.check_run(config)


def test_removing_a_linked_checkpoint_keeps_the_link_target(ranks, tmp_path):
    save_steps(ranks, tmp_path / "other", (1,))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    elsewhere = tmp_path / "other" / "checkpoints" / "step_00000001"
    (tmp_path / "run" / "checkpoints" / "step_00000001").symlink_to(elsewhere)
    assert save_steps(ranks, tmp_path / "run", (2, 3), keep=1) == ["step_00000003"]
    assert (elsewhere / "manifest.json").exists()


def test_just_committed_checkpoint_is_never_removed(ranks, tmp_path):
    save_steps(ranks, tmp_path, (5,), keep=1)
    assert save_steps(ranks, tmp_path, (3,), keep=1) == ["step_00000003"]


def save_recorded(run_dir):
    """Save twice on a rank. Returns what is synced, renamed and removed, in order."""
    operations = []

    def record(module, name, label):
        original = getattr(module, name)

        def call(first, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            operations.append((label, Path(path).name))
            return original(first, *args, **kwargs)

        setattr(module, name, call)
        return lambda: setattr(module, name, original)

    undo = [record(os, "fsync", "sync"), record(os, "rename", "rename"), record(shutil, "rmtree", "remove")]
    try:
        save_state(GridSizes(), False, run_dir, (1, 2), keep=1)
    finally:
        for restore in undo:
            restore()
    return operations


def test_files_are_synced_before_the_rename_and_removal_comes_last(ranks, tmp_path):
    operations = ranks.run(1, save_recorded, tmp_path)[0]
    second = operations[operations.index(("sync", "checkpoints")) + 1 :]
    partial = "step_00000002.partial"
    files = {(kind, name) for kind, name in second[: second.index(("sync", partial))] if kind == "sync"}
    assert files >= {("sync", n) for n in ("rank_00000.bin", "tensors.json", "meta.json", "tokenizer.json")}
    assert second[second.index(("sync", partial)) - 1] == ("sync", "manifest.json")
    ending = second[second.index(("sync", partial)) :]
    assert ending[:5] == [
        ("sync", partial),
        ("rename", partial),
        ("sync", "checkpoints"),
        ("rename", "step_00000001"),
        ("remove", "step_00000001.removed"),
    ]


def save_while_it_is_read(run_dir, name):
    """Save, again and again, while a file of the removed ``name`` is open. On NFS, it then cannot be removed.

    Return the warnings.
    """
    unlink = os.unlink

    def refuse(path, *args, **kwargs):
        if path == "rank_00000.bin" and name in os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return unlink(path, *args, **kwargs)

    os.unlink = refuse
    warnings = io.StringIO()
    try:
        with redirect_stderr(warnings):
            save_state(GridSizes(), False, run_dir, (1, 2, 3, 4), keep=1)
    finally:
        os.unlink = unlink
    return warnings.getvalue().splitlines()


def test_runs_go_on_if_an_old_checkpoint_cannot_be_removed(ranks, tmp_path):
    warnings = ranks.run(1, save_while_it_is_read, tmp_path, "step_00000002")[0]
    assert all(
        re.fullmatch(r"warning: \S+step_00000002(\.removed)? cannot be removed \(Device or resource busy\) .*", line)
        for line in warnings
    )
    assert len(warnings) == 2
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000002.removed", "step_00000004"}
    left = tmp_path / "checkpoints" / "step_00000002.removed"
    assert [path.name for path in left.iterdir()] == ["rank_00000.bin"], "everything else is removed"
    assert save_steps(ranks, tmp_path, (5,), keep=1) == ["step_00000005"]


def test_leftovers_of_this_step_must_be_removed(ranks, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (3, 9):
        partial = tmp_path / "checkpoints" / f"step_0000000{step}.partial"
        partial.mkdir()
        (partial / "rank_00000.bin").write_text("")
    with pytest.raises(RankFailure, match=r"step_00000003 could not be saved \(Device or resource busy\)"):
        ranks.run(1, save_while_it_is_read, tmp_path, ".partial")
