"""Output that nobody can read any more ends no command."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from gpt4d.config import compose
from gpt4d.config.commands import one_line_errors
from gpt4d.training.run import train
from tests.support.environment import REPOSITORY
from tests.support.jobs import ended_job

PROGRAM = """
import sys
from gpt4d.config.commands import one_line_errors
with one_line_errors():
    sys.stdin.read()
    print("lost", flush=True)
    print("a warning", file=sys.stderr, flush=True)
    open("done", "w").close()
"""


@pytest.mark.parametrize("lost", ["closed pipe", "closed by the shell", "full disk"])
def test_a_command_ends_with_0_if_its_output_is_lost(tmp_path, lost):
    redirection = {"closed by the shell": ">&- 2>&-", "full disk": "> /dev/full 2>&1", "closed pipe": ""}[lost]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        process.stderr.close()
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "done").exists()


def lose_output(rank):
    if rank == 0:
        reader, writer = os.pipe()
        os.close(reader)
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)


def test_a_run_whose_output_is_lost_trains_to_its_end(ranks, tiny):
    """As in ``torchrun … train.py | head``."""
    job = ended_job(ranks.context, tiny("parallel.gz=2", "train.steps=2"), [0, 0], lose_output)
    assert job.metric_lines()[-1]["event"] == "done"


def test_ctrl_c_ends_a_command_with_one_line_and_130(capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise KeyboardInterrupt
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


LONG = "a" * 300  # no file system has such a name; a directory of another user fails at the same places
SETTINGS = "run.dir", "checkpoint.init", "checkpoint.resume", "data.tokenizer", "data=tokens data.path"
PATHS = {
    "checkpoint": lambda: Checkpoint.open(Path(LONG)),
    "source": lambda: import_model(LONG, Path("out")),
    **{key: lambda key=key: train(compose([*f"{key}={LONG}".split(), "run.dry=true"])) for key in SETTINGS},
}


@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_cannot_be_accessed_is_one_line(capsys, monkeypatch, key):
    monkeypatch.setattr("faulthandler.enable", lambda: None)  # it needs the real stderr
    with pytest.raises(SystemExit) as ended, one_line_errors():
        PATHS[key]()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith(f"error: {LONG}") and ": File name too long; use a path" in line


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOENT])
def test_a_missing_file_that_no_check_has_found_is_a_bug_with_a_traceback(capsys, number):
    with pytest.raises(FileNotFoundError if number == errno.ENOENT else SystemExit), one_line_errors():
        raise OSError(number, os.strerror(number), "file")
