"""Which checkpoints a run has, which stay, and which are never chosen."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, GridSizes, ModelConfig
from tests.checkpoint import MODEL, meta, saved_by


def saved(ranks, run_dir, steps, keep=2, keep_every=None):
    for step in steps:
        config = {"keep": keep, "keep_every": keep_every}
        ranks.run(1, saved_with, run_dir, step, config)
    return [path.name for path in sorted((run_dir / "checkpoints").iterdir())]


def saved_with(run_dir, step, config):
    saved_by(GridSizes(), False, run_dir, (step,), **config)


def test_the_newest_and_the_milestones_are_kept(ranks, tmp_path):
    names = saved(ranks, tmp_path, (5, 10, 15, 20, 25), keep=2, keep_every=10)
    assert names == ["step_00000010", "step_00000020", "step_00000025"]
    assert saved(ranks, tmp_path, (100_000_000,), keep=1) == ["step_100000000"]


def test_what_an_interruption_left_is_never_chosen_and_removed_by_the_next_save(ranks, tmp_path):
    saved(ranks, tmp_path, (1, 2))
    checkpoints = tmp_path / "checkpoints"
    for name in ("step_00000003.partial", "step_00000004.removed", "step_00000005.damaged"):
        (checkpoints / name).mkdir()
    assert [path.name for path in checkpoint_dir.resume_candidates("auto", tmp_path)] == [
        "step_00000002",
        "step_00000001",
    ]
    assert saved(ranks, tmp_path, (6,)) == ["step_00000002", "step_00000006"]


def test_what_resume_means(ranks, tmp_path):
    assert (
        checkpoint_dir.resume_candidates("auto", tmp_path) == [] == checkpoint_dir.resume_candidates("never", tmp_path)
    )
    saved(ranks, tmp_path, (2, 11))
    elsewhere, older = tmp_path / "elsewhere", tmp_path / "checkpoints" / "step_00000002"
    assert [path.name for path in checkpoint_dir.resume_candidates(str(tmp_path), elsewhere)] == ["step_00000011"]
    assert checkpoint_dir.resume_candidates(str(older), elsewhere) == [older]
    assert [path.name for path in checkpoint_dir.resume_candidates(str(tmp_path), tmp_path)] == ["step_00000011"]
    for resume in ("never", str(older)):  # would write older steps beside newer ones, and lose them
        with pytest.raises(ConfigError, match=r"choose another run\.name"):
            checkpoint_dir.resume_candidates(resume, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"format": 3}', "[" * 100_000])
def test_a_directory_that_is_no_checkpoint_is_damaged(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(Damaged, match=r"meta\.json: damaged"):
        checkpoint_dir.Meta.read(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_but_not_called_damaged(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ConfigError, match="of format 99, this version reads 3") as raised:
        checkpoint_dir.Meta.read(tmp_path)
    assert not isinstance(raised.value, Damaged)


def test_meta_survives_the_disk(tmp_path):
    written = meta(5, ModelConfig(dropout=0.25))
    (tmp_path / "meta.json").write_bytes(written.to_json())
    assert checkpoint_dir.Meta.read(Path(tmp_path)) == written


def test_the_first_that_can_be_read_decides_whether_the_model_fits(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "meta.json").write_bytes(meta(5, ModelConfig()).to_json())
    with pytest.raises(ConfigError, match=r"model\.layers=1: the checkpoint .*whole has 4"):
        checkpoint_dir.check_newest_fits([tmp_path / "damaged", tmp_path / "whole"], MODEL)


def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_what_it_points_to_is_not(ranks, tmp_path):
    saved(ranks, tmp_path / "other", (1,))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    elsewhere = tmp_path / "other" / "checkpoints" / "step_00000001"
    (tmp_path / "run" / "checkpoints" / "step_00000001").symlink_to(elsewhere)
    assert saved(ranks, tmp_path / "run", (2, 3), keep=1) == ["step_00000003"]
    assert (elsewhere / "manifest.json").exists()


def test_what_was_just_committed_is_never_removed(ranks, tmp_path):
    saved(ranks, tmp_path, (5,), keep=1)
    assert saved(ranks, tmp_path, (3,), keep=1) == ["step_00000003"]


def save_recorded(run_dir):
    """On a rank: saves twice, and lists what is synced, renamed and removed, in order."""
    happened = []

    def recorded(module, name, label):
        original = getattr(module, name)

        def call(first, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            happened.append((label, Path(path).name))
            return original(first, *args, **kwargs)

        setattr(module, name, call)
        return lambda: setattr(module, name, original)

    undo = [recorded(os, "fsync", "sync"), recorded(os, "rename", "rename"), recorded(shutil, "rmtree", "remove")]
    try:
        saved_by(GridSizes(), False, run_dir, (1, 2), keep=1)
    finally:
        for one in undo:
            one()
    return happened


def test_everything_is_on_the_disk_before_the_rename_and_nothing_is_removed_before_that_is(ranks, tmp_path):
    happened = ranks.run(1, save_recorded, tmp_path)[0]
    second = happened[happened.index(("sync", "checkpoints")) + 1 :]
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


def save_where_nothing_can_be_removed(run_dir):
    removed = shutil.rmtree

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".removed"):
            raise PermissionError(13, "Permission denied", str(path))
        return removed(path, *args, **kwargs)

    shutil.rmtree = refuse
    try:
        return saved_by(GridSizes(), False, run_dir, (1, 2), keep=1)
    finally:
        shutil.rmtree = removed


def test_a_save_is_not_failed_because_an_old_one_cannot_be_removed(ranks, tmp_path):
    assert ranks.run(1, save_where_nothing_can_be_removed, tmp_path)[0].path.name == "step_00000002"
    assert saved(ranks, tmp_path, (3,), keep=1) == ["step_00000003"]
