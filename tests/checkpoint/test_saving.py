"""Saving in the background: training continues at once, and failures are reported."""

import errno
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpt4d.checkpoint import checkpoint_dir, saving, storage, tensor_files
from gpt4d.checkpoint.saving import HostMemory
from gpt4d.config import CheckpointConfig, ConfigError, GridSizes
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.support.checkpoints import DOCUMENTS, MODEL, build, meta, names, save_state
from tests.support.grids import build_model, train_in_rank
from tests.support.rank_pool import RankFailure

GRID = GridSizes(1, 1, 2)


def change_while_writing(run_dir):
    """Change the parameters on a rank after the save has started and before it writes."""
    model, optimizer = build(GRID)
    changed, write = threading.Event(), tensor_files.write_values

    def write_late(path, tensors):
        assert changed.wait(60)
        return write(path, tensors)

    tensor_files.write_values = write_late
    saver = saving.Saver(CheckpointConfig(async_save=True), run_dir, model.context.grid)
    try:
        saver.start(meta(1), storage.parts(model, optimizer), DOCUMENTS)
        assert saver.finished() is None
        saver.before_change()
        for parameter in model.parameters():
            parameter.detach().fill_(9.0)
        changed.set()
        return saver.finished(wait=True)
    finally:
        tensor_files.write_values = write
        saver.close()


def test_saved_values_are_those_at_the_start_of_the_save(ranks, tmp_path):
    saved = ranks.run(2, change_while_writing, tmp_path)[0]
    assert saved.progress.step == 1 and saved.blocked_s > 0
    files = tensor_files.Files(saved.path)
    for name, parameter in build_model(MODEL, GridSizes(), torch.float32, seed=7).named_parameters():
        assert torch.equal(files.global_tensor(f"model.{name}"), parameter.detach())


def staging_addresses(run_dir):
    """Save three times on a rank. Returns the addresses of the copies in host memory."""
    addresses, like = [], HostMemory.like

    def record(self, tensors):
        copies = like(self, tensors)
        addresses.append({name: copy.data_ptr() for name, copy in copies.items()})
        return copies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "like", record)
        save_state(GRID, False, run_dir, (1, 2, 3))
    return addresses


def test_staging_buffers_are_reused_by_every_save(ranks, tmp_path):
    first, *others = ranks.run(2, staging_addresses, tmp_path)[0]
    assert first and others == [first, first]


def fail_on_the_second_rank(run_dir, async_save):
    """Save twice; the second time, the disk of rank 1 is full. Returns this rank's error message."""
    model, optimizer = build(GRID)
    write = tensor_files.write_values

    def fail_if_full(path, tensors):
        if path.parent.name.startswith("step_00000002") and path.name == "rank_00001.bin":
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, tensors)

    tensor_files.write_values = fail_if_full
    saver = saving.Saver(CheckpointConfig(async_save=async_save), run_dir, model.context.grid)
    try:
        for step in (1, 2):
            saver.start(meta(step), storage.parts(model, optimizer), DOCUMENTS)
            while saver.finished() is None:
                pass
    except ConfigError as error:
        return str(error)
    finally:
        tensor_files.write_values = write
        saver.close()


@pytest.mark.parametrize("async_save", [True, False])
def test_write_failure_of_one_rank_is_raised_on_all_and_leaves_no_files(ranks, tmp_path, async_save):
    messages = ranks.run(2, fail_on_the_second_rank, tmp_path, async_save)
    assert messages[0] == messages[1]
    assert "step_00000002 could not be saved (rank 1: No space left on device)" in messages[0]
    assert "the run can resume from step_00000001" in messages[0]
    assert names(tmp_path) == ["step_00000001"]


def train_on_a_small_disk(config, limit):
    """Train on a rank with files limited to ``limit`` bytes each."""
    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        trainer.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_background_save_soon_fails_the_run(ranks, tiny):
    run = tiny("train.steps=400", "checkpoint.every=2")
    with pytest.raises(RankFailure, match=r"step_00000002 could not be saved \(rank 0: File too large\)"):
        ranks.run(2, train_on_a_small_disk, run, 60_000)
    assert len((Path(run.run.dir) / "metrics.jsonl").read_text().splitlines()) < 400
    assert names(Path(run.run.dir)) == []
    ranks.run(2, train_in_rank, tiny("train.steps=4"))
    assert names(Path(run.run.dir)) == ["step_00000004"]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 2 MB; skip the test without permission to mount."""
    point = tmp_path / "disk"
    point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", point], capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield point
    subprocess.run(["umount", point], check=True)


def test_full_disk_leaves_only_committed_checkpoints(ranks, tiny, small_disk):
    straight = tiny("train.steps=2")
    ranks.run(2, train_in_rank, straight)
    size = sum(path.stat().st_size for path in checkpoint_dir.committed(Path(straight.run.dir))[0].iterdir())
    keep = 2 * 2**20 // size + 5  # more than fit
    run_dir = small_disk / "run"
    options = ("optim.schedule_steps=8", "checkpoint.every=1", f"checkpoint.keep={keep}", f"run.dir={run_dir}")
    with pytest.raises(RankFailure, match=r"No space left on device.*the run can resume from step_"):
        ranks.run(2, train_in_rank, tiny("train.steps=40", *options))
    committed = checkpoint_dir.committed(run_dir)
    assert committed and set((run_dir / "checkpoints").iterdir()) == set(committed)


def save_and_fail(run_dir):
    model, optimizer = build(GRID)
    saver = saving.Saver(CheckpointConfig(), run_dir, model.context.grid)
    try:
        saver.start(meta(1), storage.parts(model, optimizer), DOCUMENTS)
        raise ConfigError("something else")
    finally:
        saver.close()


def test_pending_save_completes_when_the_run_fails(ranks, tmp_path):
    with pytest.raises(RankFailure, match="something else"):
        ranks.run(2, save_and_fail, tmp_path)
    assert [path.name for path in checkpoint_dir.committed(tmp_path)] == ["step_00000001"]


def test_existing_checkpoint_is_not_overwritten(ranks, tmp_path):
    ranks.run(1, save_state, GridSizes(), False, tmp_path)
    with pytest.raises(RankFailure, match=r"step_00000003 could not be saved .*not empty"):
        ranks.run(1, save_state, GridSizes(), False, tmp_path)
    assert names(tmp_path) == ["step_00000003"]
