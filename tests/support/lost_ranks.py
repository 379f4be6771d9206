"""The time from a fault of one rank to the end of all others, with the real limits of the watchdog.

    python -m tests.support.lost_ranks [repeats=3] [timeout_s=10] [out=FILE]

It prints a table in Markdown: the median and the maximum of ``repeats`` runs on two ranks of this machine, by fault.
"""

import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt4d.config import from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.training.run import train
from tests.support.environment import REPOSITORY
from tests.support.faults import PHASES, at_step, block, kill, replace_function, shorten_timeouts
from tests.support.jobs import TIMEOUT_S, LaunchedJob, ended_job
from tests.support.rank_pool import RankPool
from tests.support.settings import configured

# By fault: the rank that it strikes, and the signal or the phase of a hang.
_FAULTS = {
    "kill rank 0": (0, signal.SIGKILL),
    "kill rank 1": (1, signal.SIGKILL),
    "stop rank 0": (0, signal.SIGSTOP),
    "stop rank 1": (1, signal.SIGSTOP),
    **{f"rank {rank} hangs in {phase}": (rank, phase) for phase, rank in (("update", 1), ("save", 1), ("begin", 0))},
    **{f"rank {rank} hangs in {phase}": (rank, phase) for phase, rank in (("load", 1), ("preflight", 1))},
}
_LAUNCHER = {"kill torchrun": signal.SIGKILL, "stop torchrun": signal.SIGSTOP}
_LIMIT_S = 120.0


@dataclass
class LostRanks:
    repeats: int = 3
    timeout_s: float = 10.0
    out: str | None = None


def settings(directory: Path, timeout_s: float, *more: str) -> list[str]:
    return [
        *("model=gpt_tiny", "model.layers=2", "model.hidden=24", "model.heads=4", "model.vocab_size=300"),
        *("model.vocab_multiple=16", "model.max_positions=16", f"data.cache_dir={directory / 'cache'}"),
        *("data.processes=1", "logging.every=1", f"run.dir={directory / 'run'}"),
        *("train.steps=100000", "train.batch_size=4", "train.validate_every=0", "logging.sample_tokens=0"),
        *("parallel.gz=2", f"parallel.timeout_s={timeout_s}", "checkpoint.every=0", *more),
    ]


def _strike(path: Path, act: Callable[[], object], *_, **__) -> None:
    path.write_text(str(time.time()))
    act()


def _arm(path: Path, target: int, fault: signal.Signals | str, rank: int) -> None:
    if rank != target:
        return
    if isinstance(fault, signal.Signals):
        at_step(5, functools.partial(_strike, path, functools.partial(kill, fault)))
        return
    module, function, *_ = PHASES[fault]
    arm = functools.partial(replace_function, module, function, functools.partial(_strike, path, block))
    at_step(5, lambda _: arm()) if fault == "update" else arm()


def _measure(context, directory: Path, target: int, fault: signal.Signals | str, timeout_s: float) -> tuple[float, str]:
    """Return the seconds until all ranks but a stopped or killed one have ended, and their output."""
    path = directory / "struck"
    path.unlink(missing_ok=True)
    every = 3 if fault in ("save", "begin", "load") else 0
    overrides = settings(directory, timeout_s, f"checkpoint.every={every}")
    if fault == "load":
        ended_job(context, configured([*overrides, "train.steps=3"]), [0, 0])
    with LaunchedJob(context, configured(overrides), 2, functools.partial(_arm, path, target, fault)) as job:
        for rank in range(2):
            if rank != target or isinstance(fault, str):
                job.exit_code(rank, _LIMIT_S)
        ended = time.time()
        return ended - float(path.read_text()), "".join(job.outputs())


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent does not collect it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def under_torchrun(
    directory: Path, number: signal.Signals, overrides: list[str], shorten: bool = False
) -> tuple[float, str]:
    """Train on two ranks under torchrun, which gets a signal in step 5.

    Returns the seconds from the signal to the end of both ranks, and their output. ``shorten``: use short timeouts.
    """
    log = directory / "output"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.lost_ranks", "rank", str(int(number)), str(directory), str(shorten), *overrides]
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=REPOSITORY) as agent:
        deadline = time.monotonic() + TIMEOUT_S
        files = [directory / f"pid{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() and _has_ended(int(file.read_text())) for file in files):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        ended = time.time()
        agent.kill()
    return ended - float((directory / "struck").read_text()), log.read_text()


def _train_under_torchrun(number: str, directory: str, shorten: str, *overrides: str) -> None:
    """Train on a rank of ``under_torchrun``. Rank 1 sends the signal."""
    if shorten == "True":
        shorten_timeouts()
    Path(directory, f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        strike = functools.partial(os.kill, os.getppid(), int(number))
        at_step(5, functools.partial(_strike, Path(directory, "struck"), strike))
    train(configured(list(overrides)))


def main(arguments: list[str]) -> None:
    config, pool = from_arguments(LostRanks, arguments), RankPool()
    rows = ["| fault | median s | maximum s | named |", "|---|---|---|---|"]
    for name in (*_FAULTS, *_LAUNCHER):
        seconds = []
        for _ in range(config.repeats):
            with tempfile.TemporaryDirectory() as temporary:
                directory = Path(temporary)
                if name in _LAUNCHER:
                    taken, output = under_torchrun(directory, _LAUNCHER[name], settings(directory, config.timeout_s))
                else:
                    taken, output = _measure(pool.context, directory, *_FAULTS[name], config.timeout_s)
            seconds.append(taken)
            (message,) = re.findall(r"^error: (.*)", output, re.MULTILINE)
            print(f"{name}: {taken:.1f} s, {message}", file=sys.stderr, flush=True)
        *_, named = re.findall(r"(?:^|: )(rank \d|the launcher)", message)
        rows.append(f"| {name} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {named} |")
    pool.close()
    table = "\n".join(rows) + "\n"
    print(table, end="")
    if config.out:
        Path(config.out).write_text(table)


if __name__ == "__main__":
    with one_line_errors():
        if sys.argv[1:2] == ["rank"]:
            _train_under_torchrun(*sys.argv[2:])
        else:
            main(sys.argv[1:])
