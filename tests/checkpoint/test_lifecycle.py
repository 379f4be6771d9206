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
from tests.checkpoint import save_state, save_steps
from tests.support.rank_pool import RankFailure


def test_newest_checkpoints_and_milestones_are_kept(ranks, tmp_path):
    names = save_steps(ranks, tmp_path, (5, 10, 15, 20, 25), keep=2, keep_every=10)
    assert names == ["step_00000010", "step_00000020", "step_00000025"]
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
