"""Processes for checks: one each, so that a crash, a hang or a lack of memory fails one check only.

A forkserver that has imported torch, but has not initialized CUDA, starts a check in less than a second. The check and
the ranks that it starts form a process group, which is killed as a whole when the check has ended.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from benchmarks.gpu.check import CheckContext, Outcome, Unavailable

_PRELOAD = [
    "torch.profiler",
    "matplotlib.figure",
    "hydra",
    "tokenizers",
    "gpt4d.trainer",
    "gpt4d.planner.calibrate",
    "gpt4d.parallel.resharding.transfer",
]
_LOG_CHARACTERS = 4000  # of the end of a failed check's output that are kept
_PROBLEM_CHARACTERS = 600


def run_isolated(target: str, context: CheckContext, limit_s: float) -> Outcome:
    """Return the outcome of ``target``, ``module:function``, called in a process of its own.

    If it raises, dies or takes longer than ``limit_s`` seconds, the outcome says so, and ``values["log"]`` is the end
    of its output. No process is left behind.
    """
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(_PRELOAD)
    receiver, sender = forkserver.Pipe(duplex=False)
    log = context.directory / "log"
    process = forkserver.Process(target=_call, args=(target, context, sender, log))
    process.start()
    sender.close()
    outcome = None
    try:
        # Ranks inherit the pipe, so the end of the process is not always the end of the pipe.
        in_time = bool(wait([receiver, process.sentinel], limit_s))
        if receiver.poll():
            with suppress(EOFError):
                outcome = cast(Outcome, receiver.recv())
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.join()
    if outcome is None:
        ended = f"the process ended with exit code {process.exitcode}"
        outcome = Outcome(problems=[ended if in_time else f"no result within {limit_s:.0f} s"])
    if outcome.problems and log.exists():
        outcome.values["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    return outcome


def _call(target: str, context: CheckContext, sender: Connection, log: Path) -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    redirect_output(log)
    tempfile.tempdir = str(context.directory)  # Files of processes that are killed are removed with it.
    module, name = target.split(":")
    try:
        outcome = getattr(import_module(module), name)(context)
    except Unavailable as error:
        outcome = Outcome(problems=[str(error)])
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(problems=[describe_error(error)])
    sender.send(outcome)


def _end_with_parent() -> None:
    """Kill this process group if the driver dies without ending its check."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os.killpg(0, signal.SIGKILL)


def redirect_output(log: Path) -> None:
    """Write standard output and standard error of this process to ``log``."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def describe_error(error: BaseException) -> str:
    """Return the type and the beginning of the message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_PROBLEM_CHARACTERS]
