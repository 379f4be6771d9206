"""Runs as their files describe them: the lock of a directory, states, differing settings, plots."""

import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpt4d.config import ConfigError
from gpt4d.runs import lock

ROOT = Path(__file__).resolve().parents[1]
HOLD = """
import sys
from gpt4d.runs.lock import DirectoryLock, Path
held = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


@contextmanager
def locked_by_another_process(directory):
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_in_one_directory_ends_with_one_line_and_the_lock_ends_with_its_process(tmp_path, tiny):
    from train import train

    config = tiny()
    run_dir = Path(config.run.dir)
    with locked_by_another_process(run_dir) as process:
        expected = (
            rf"run\.dir={re.escape(str(run_dir))}: another run \(\S+, pid {process.pid}, since .*\) is using it; wait"
        )
        with pytest.raises(ConfigError, match=expected):
            train(config)
        with pytest.raises(ConfigError, match=expected):
            lock.DirectoryLock(run_dir)
        assert lock.is_locked(run_dir)
        process.kill()  # like a machine that loses power: nothing is cleaned up
        process.wait()
        assert not lock.is_locked(run_dir)
        assert lock.last_holder(run_dir).pid == process.pid
    lock.DirectoryLock(run_dir).close()


def test_a_requeued_slurm_job_waits_for_the_lock_of_its_earlier_start(tmp_path, monkeypatch):
    first = lock.Holder("nid001", 1, 0.0, "4711", 0)
    assert first.requeued_as(first._replace(host="nid002", restart=1))
    assert not first.requeued_as(first._replace(pid=2))
    assert not first.requeued_as(first._replace(job="4712", restart=1))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with locked_by_another_process(tmp_path) as process:
        with pytest.raises(ConfigError):
            lock.check_unused(tmp_path)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        lock.check_unused(tmp_path)
        monkeypatch.setattr("time.sleep", lambda s: (process.kill(), process.wait()))
        lock.DirectoryLock(tmp_path).close()
