"""Files that cannot be written: a log keeps its lines, and a run ends as its results deserve."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.model_directory import new_directory
from gpt4d.config import ConfigError
from gpt4d.parallel.pipeline import __main__ as schedules
from gpt4d.parallel.resharding import __main__ as reshardings
from gpt4d.planner import __main__ as planner
from gpt4d.runs import starts
from gpt4d.runs.lock import DirectoryLock
from gpt4d.runtime import files
from gpt4d.runtime.files import read_json_lines
from tests.support.commands import wrong_messages
from tests.support.damage import DAMAGES, NOT_FILES
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.run_files import events
from tests.support.training import before_each_step, build_trainer


class Disk:
    """A disk that accepts ``free`` more bytes."""

    def __init__(self, monkeypatch, free):
        self.free, self.write = free, os.write
        monkeypatch.setattr(files.os, "write", self)

    def __call__(self, descriptor, content):
        written = self.write(descriptor, content[: self.free])
        self.free -= written
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written


def test_a_log_writes_the_lines_of_a_full_disk_once_it_has_space(tmp_path, monkeypatch, capsys):
    path = tmp_path / "log"
    path.write_text("a line that a crash has cu")
    disk = Disk(monkeypatch, 15)
    log = files.LineLog(path)
    for number in range(4):
        log.append(f"line {number}")
    assert path.read_text() == "a line that a crash has cu\nline 0\nline 1\n"[:41]
    waiting = f"{path}: No space left on device; its lines wait in memory until it can be written again"
    assert capsys.readouterr().err == f"warning: {waiting}\n"
    disk.free = 1000
    log.append("line 4")
    log.close()
    log.append("after close")
    lines = [*(f"line {number}" for number in range(5)), "after close"]
    assert path.read_text().splitlines() == ["a line that a crash has cu", *lines]


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace_file(path, "old")

    def fail(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", fail)  # before the file is renamed
        files.replace_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", ".these-ranks-meet-here"])
def test_a_file_that_a_start_needs_is_named_if_it_cannot_be_written(ranks, tiny, name):
    config = tiny("train.steps=2")
    (Path(config.run.dir) / name).mkdir(parents=True)
    with pytest.raises(RankFailure, match=rf"ConfigError: .*{name}.*: Is a directory"):
        ranks.run(1, train_in_rank, config)


def test_a_run_is_finished_even_if_its_plot_cannot_be_written(ranks, tiny):
    config = tiny("train.steps=2")
    (Path(config.run.dir) / "loss.png").mkdir(parents=True)
    ranks.run(1, train_in_rank, config)
    assert events(config.run.dir)[-1]["event"] == "done"


def train_and_change_directory(config, change):
    """Train, and call ``change(run_dir)`` on rank 0 in the second step."""
    trainer = build_trainer(config)
    files = trainer.files
    with before_each_step(trainer, lambda step: change(files.run_dir) if step == 2 and files.lock else None):
        trainer.run()


def test_a_run_whose_directory_is_removed_creates_it_again_and_saves(ranks, tiny):
    config = tiny("parallel.gz=2", "train.steps=4", "checkpoint.every=2")
    ranks.run(2, train_and_change_directory, config, shutil.rmtree)
    run_dir = Path(config.run.dir)
    assert [path.name for path in checkpoint_dir.committed(run_dir)] == ["step_00000002", "step_00000004"]
    assert [line["step"] for line in metric_lines(run_dir)] == [3, 4]
    kinds = [line["event"] for line in events(run_dir)]
    assert kinds[:2] == ["removed", "start"] and kinds[-1] == "done"
    assert len(starts.read(run_dir)) == 1 and (run_dir / "config.yaml").exists()
    ranks.run(2, train_in_rank, tiny("parallel.gz=2", "train.steps=5"))


def replace_with_other_run(run_dir):
    shutil.rmtree(run_dir)
    run_dir.with_name("other").rename(run_dir)


def test_a_run_whose_directory_is_replaced_ends_and_leaves_the_other_run_alone(ranks, tiny, tmp_path):
    ranks.run(1, train_in_rank, tiny("train.steps=1", f"run.dir={tmp_path / 'other'}"))
    before = (tmp_path / "other" / "metrics.jsonl").read_text()
    with pytest.raises(RankFailure, match=r"run\.dir=\S+/run: replaced during the run by the directory of another run"):
        ranks.run(1, train_and_change_directory, tiny("train.steps=2"), replace_with_other_run)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert [path.name for path in checkpoint_dir.committed(tmp_path / "run")] == ["step_00000001"]


def test_a_lock_is_valid_until_its_file_is_removed_or_replaced(tmp_path):
    lock = DirectoryLock(tmp_path)
    assert lock.is_valid()
    (tmp_path / "lock").unlink()
    assert not lock.is_valid()
    other = DirectoryLock(tmp_path)
    assert other.is_valid() and not lock.is_valid()
    lock.close()
    other.close()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "plot.png").symlink_to("/dev/full")
    plot, full_disk = f"plot={tmp_path / 'plot.png'}", "plot.png: No space left on device; free space"
    resharding = ["src=S0R", "src_mesh=1x2", "dst=RS0", "dst_mesh=1x2", "shape=8,8"]
    mistakes = [
        (schedules.main, [plot], full_disk),
        (reshardings.main, [*resharding, plot], full_disk),
        (planner.main, ["world_size=2", "model=gpt_tiny", "top=1", plot], full_disk),
        (files.LineLog, tmp_path / "log", f"{tmp_path}/log: Is a directory"),
        (lambda path: new_directory(path).__enter__(), tmp_path / ("x" * 300), "out= … File name too long"),
        (schedules.main, ["forward=0", "backward=0"], "forward=0 backward=0: a stage without work"),
    ]
    assert not wrong_messages(mistakes, lambda write, argument: write(argument))


def resumed_losses(config, cases, steps):
    """Resume a copy of a run in ``steps`` steps with each damage, and return its losses or the line that ends it."""
    run_dir, found = Path(config.run.dir), {}
    for file, damage in cases:
        copy = run_dir.with_name(f"{file} {damage}")
        shutil.copytree(run_dir, copy)
        if damage:
            DAMAGES[damage](copy / file)
        config.run.dir, config.train.steps = str(copy), steps
        try:
            checkpoint_dir.check_run(config)
            train_in_rank(config)
            found[file, damage] = losses_after(copy, 2)
        except ConfigError as error:
            found[file, damage] = str(error)
    return found


def losses_after(run_dir, step):
    """Return the losses after a step in the intact lines of metrics.jsonl."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line and "event" not in line and line["step"] > step]


FILES = "metrics.jsonl", "starts.jsonl", "config.yaml", "lock"
REFUSED = {(file, damage) for file in FILES for damage in NOT_FILES if file != "config.yaml"}
REFUSED |= {("config.yaml", "directory")}  # all others are replaced
SAMPLED = [("metrics.jsonl", "random bytes"), ("metrics.jsonl", "wrong types"), ("starts.jsonl", "NULs")]
SAMPLED += [("metrics.jsonl", "FIFO"), ("starts.jsonl", "FIFO"), ("lock", "FIFO")]
ALL = [(file, damage) for file in FILES for damage in DAMAGES]


@pytest.mark.parametrize("cases", [SAMPLED, full(ALL)], ids=["sampled", "all"])
def test_a_damaged_log_changes_no_loss_of_a_resumed_run_and_never_blocks_it(ranks, tiny, cases):
    config = tiny("train.steps=2", "optim.schedule_steps=9", "checkpoint.resume=auto")
    ranks.run(1, train_in_rank, config)
    (found,) = ranks.run(1, resumed_losses, config, [("", ""), *cases], 3)
    expected = found.pop(("", ""))
    assert len(expected) == 1
    for case, losses in found.items():
        if case in REFUSED:
            file, _ = case
            assert isinstance(losses, str) and file in losses and "\n" not in losses, (case, losses)
        else:
            assert losses == expected, (case, losses)
