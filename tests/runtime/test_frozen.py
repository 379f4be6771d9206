"""A process is stopped, not ended: a rank, the rank that holds the store, or torchrun. All others end and name it."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_faults import at_step, shorten_timeouts
from tests.support.jobs import TIMEOUT_S, LaunchedJob


def freeze(target: int, rank: int) -> None:
    shorten_timeouts()
    if rank == target:
        at_step(5, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.parametrize("target", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_frozen_rank_is_named_even_if_it_holds_the_store(ranks, tiny, target):
    config = tiny("parallel.gz=2", "parallel.timeout_s=2")
    with LaunchedJob(ranks.context, config, 2, functools.partial(freeze, target)) as job:
        assert job.exit_code(1 - target) == 1, job.outputs()
        output = job.outputs()[1 - target]
    assert re.search(rf"rank {target} on \S+ (does not answer|failed: no sign of life)", output), output
    assert output.count("error:") == 1 and "Traceback" not in output


_UNDER_TORCHRUN = """
import os, sys, time
from gpt4d.runtime.errors import one_line_errors
from tests.runtime.test_faults import at_step, shorten_timeouts
from gpt4d.run import train
number, directory, shorten, *overrides = sys.argv[1:]
if shorten == "True":
    shorten_timeouts()
with open(f"{directory}/pid{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
def strike(_):
    with open(f"{directory}/struck", "w") as file:
        file.write(str(time.time()))
    os.kill(os.getppid(), int(number))
if os.environ["RANK"] == "1":
    at_step(5, strike)
with one_line_errors():
    train(configure(overrides))
"""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent does not collect it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def under_torchrun(
    directory: Path, number: signal.Signals, overrides: list[str], shorten: bool = False
) -> tuple[float, str]:
    """Train on two ranks under torchrun, which gets a signal in step 5.

    Returns the seconds from the signal to the end of both ranks, and their output. ``shorten``: use short timeouts.
    """
    program, log = directory / "launched.py", directory / "output"
    program.write_text(_UNDER_TORCHRUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(program), str(int(number)), str(directory), str(shorten), *overrides]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as agent:
        deadline = time.monotonic() + TIMEOUT_S
        files = [directory / f"pid{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() and has_ended(int(file.read_text())) for file in files):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        ended = time.time()
        agent.kill()
    return ended - float((directory / "struck").read_text()), log.read_text()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it reads the state of processes from /proc")
@pytest.mark.parametrize(
    ("number", "problem"), [(signal.SIGSTOP, "does not answer"), (signal.SIGKILL, "has ended")], ids=["stop", "kill"]
)
def test_a_lost_launcher_is_named_and_all_ranks_end(tiny, tmp_path, number, problem):
    overrides = [
        *("model=gpt_tiny", "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300"),
        *("train.seq_len=16", "data=text", f"data.path={tiny().data.path}", "data.processes=1"),
        *(f"data.cache_dir={tmp_path / 'cache'}", "train.batch_size=4", "train.steps=1000000", "checkpoint.every=0"),
        *("train.validate_every=0", "parallel.gz=2", "parallel.timeout_s=2", f"run.dir={tmp_path / 'run'}"),
    ]
    _, text = under_torchrun(tmp_path, number, overrides, shorten=True)
    assert re.search(rf"error: the launcher \(torchrun\) on \S+ {problem}", text), text
