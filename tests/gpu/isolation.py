"""Processes for checks: one each, so that a crash, a hang or a lack of memory fails one check only.

A forkserver that has imported torch, but has not initialized CUDA, starts a check in less than a second. The check and
the ranks that it starts form a process group, which is killed when the check has ended.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from tests.gpu.check import Check, NotPossible, Unavailable

_PRELOAD = ["tests.gpu.runs"]
_LOG_CHARACTERS = 4000  # retained end of a failed check's output
_PROBLEM_CHARACTERS = 600
Body = Callable[[Check], None]


def run_isolated(body: Body, check: Check, limit_s: float, environment: Mapping[str, str]) -> Check:
    """Return ``check`` as ``body(check)`` leaves it in a new process with the variables of ``environment``.

    If ``body`` raises, dies or takes longer than ``limit_s`` seconds, ``problems`` names the reason, and
    ``values["log"]`` has the last output of the check. No process remains.
    """
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(_PRELOAD)
    receiver, sender = forkserver.Pipe(duplex=False)
    log = check.directory / "log"
    process = forkserver.Process(target=_call, args=(body, check, sender, log, dict(environment)))
    with patch.dict(os.environ, environment, clear=True):  # for the forkserver, if it does not run yet
        process.start()
    sender.close()
    result = None
    try:
        # Ranks inherit the pipe, so the end of the process is not always the end of the pipe.
        in_time = bool(wait([receiver, process.sentinel], limit_s))
        if receiver.poll():
            with suppress(EOFError):
                result = cast(Check, receiver.recv())
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.join()
    if result is None:
        ended = f"the process ended with exit code {process.exitcode}"
        check.problems.append(ended if in_time else f"no result within {limit_s:.0f} s")
        result = check
    if result.problems and log.exists():
        result.values["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    return result


def _call(body: Body, check: Check, sender: Connection, log: Path, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    redirect_output(log)
    tempfile.tempdir = str(check.directory)  # so that files of killed processes are removed with it
    try:
        body(check)
    except NotPossible as error:
        check.missing = str(error)
    except Unavailable as error:
        check.problems.append(str(error))
    except Exception as error:
        traceback.print_exc()
        check.problems.append(describe_error(error))
    sender.send(check)


def _end_with_parent() -> None:
    """Kill this process group if pytest dies without ending its check."""
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
