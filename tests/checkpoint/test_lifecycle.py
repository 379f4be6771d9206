"""Commit, retention and removal of a run's checkpoints."""

import errno
import io
import os
import re
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from gpt4d.config import GridSizes
from tests.support.checkpoints import names, save_state, save_steps
from tests.support.rank_pool import RankFailure


def test_newest_checkpoints_and_milestones_are_kept(ranks, tmp_path):
    saved = save_steps(ranks, tmp_path, (5, 10, 15, 20, 25), keep=2, keep_every=10)
    assert saved == ["step_00000010", "step_00000020", "step_00000025"]
    assert save_steps(ranks, tmp_path, (100_000_000,), keep=1) == ["step_100000000"]


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
    """Save twice on a rank. Returns the paths that are synced, renamed and removed, in order."""
    operations = []

    def record(original, label):
        def call(first, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            operations.append((label, Path(path).name))
            return original(first, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name, label in ((os, "fsync", "sync"), (os, "rename", "rename"), (shutil, "rmtree", "remove")):
            patch.setattr(module, name, record(getattr(module, name), label))
        save_state(GridSizes(), False, run_dir, (1, 2), keep=1)
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
        ("sync", partial), ("rename", partial), ("sync", "checkpoints"), ("rename", "step_00000001"),
        ("remove", "step_00000001.removed"),
    ]  # fmt: skip


def save_while_it_is_read(run_dir, name):
    """Save, again and again, while a file of the removed ``name`` is open. On NFS, it then cannot be removed.

    Return the warnings.
    """
    unlink = os.unlink

    def refuse(path, *args, **kwargs):
        if path == "rank_00000.bin" and name in os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return unlink(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as warnings:
        patch.setattr(os, "unlink", refuse)
        save_state(GridSizes(), False, run_dir, (1, 2, 3, 4), keep=1)
    return warnings.getvalue().splitlines()


def test_runs_go_on_if_an_old_checkpoint_cannot_be_removed(ranks, tmp_path):
    warnings = ranks.run(1, save_while_it_is_read, tmp_path, "step_00000002")[0]
    warning = r"warning: \S+step_00000002(\.removed)? cannot be removed \(Device or resource busy\) .*"
    assert len(warnings) == 2 and all(re.fullmatch(warning, line) for line in warnings)
    assert names(tmp_path) == ["step_00000002.removed", "step_00000004"]
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
