"""Contenders in different processes whose steps alternate.

Frameworks keep global state, so each has its own *worker group*: one process per rank, started once and alive for the
entire run. A machine whose speed drifts therefore drifts for all contenders alike. An idle group is stopped (SIGSTOP):
blocking on standard input is not enough, since each of gloo's threads wakes up a hundred times per second.

The parent writes a contender's name to every rank of its group, and rank 0 answers (``benchmarks.worker``).
"""

import importlib.util
import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks import report
from benchmarks.cluster import EmulatedCluster, LocalHost


class WorkerGroup:
    """The rank processes of one framework, as the parent sees them.

    Args:
        start: starts the processes with the given Popen pipes and returns them, rank 0 first.
        timeout_s: how long to wait for an answer.
    """

    def __init__(self, start: Callable[..., list[subprocess.Popen]], timeout_s: float = 1200):
        self.timeout_s = timeout_s
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 – a pipe that nobody reads would fill up
        self.processes = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.contenders: list[str] = []

    def wait_until_ready(self) -> None:
        self.contenders = self._read_answer()["contenders"]
        self._signal(signal.SIGSTOP)

    def step(self, contender: str) -> dict:
        """Run one step and return its answer, ``{"seconds": …}`` and additional keys.

        Raises RuntimeError with the ranks' standard error if one has ended, or if no answer comes in time.
        """
        self._signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.stdin.write(contender + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                process.wait()
                self._check_alive()
        answer = self._read_answer()
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, signal_number: int) -> None:
        for process in self.processes:
            process.send_signal(signal_number)

    def _read_answer(self) -> dict:
        stdout, deadline = self.processes[0].stdout, time.monotonic() + self.timeout_s
        # When a rank fails, its peers wait for it, so rank 0 may never answer.
        while not select.select([stdout], [], [], 1.0)[0]:
            self._check_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {self.timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            self.processes[0].wait()
            self._check_alive()
        return json.loads(line)

    def _check_alive(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.errors.seek(0)
                raise RuntimeError(f"rank {rank} of {process.args} ended:\n{self.errors.read()[-4000:]}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class WorkerSpec(NamedTuple):
    """A worker group to start: the function that builds its contenders, the package it needs, its settings."""

    family: str  # in the results
    module: str
    function: str
    needs: str
    arguments: tuple[str, ...]


_FRAMEWORKS = {  # adapter and package
    "ours": ("gpt4d", "torch"),
    "torch": ("torch", "torch"),
    "transformers": ("torch", "transformers"),
    "megatron-core": ("megatron", "megatron"),
    "AxoNN": ("axonn", "axonn"),
}


def contenders(family: str, function: str, arguments: Sequence[str], needs: str | None = None) -> WorkerSpec:
    """Return the worker group of a framework's adapter. ``needs`` replaces the package that the framework needs."""
    adapter, package = _FRAMEWORKS[family]
    return WorkerSpec(family, f"benchmarks.adapters.{adapter}", function, needs or package, tuple(arguments))


def interleave(
    cluster: EmulatedCluster | LocalHost, specs: Iterable[WorkerSpec], repeats: int, warm_up: int = 2
) -> list[dict]:
    """Run all contenders alternately, ``repeats`` times each, and return one row (``report.row``) per contender.

    Skips specs whose package is not installed. ``warm_up`` steps per contender run first and are not measured.
    """
    # Job limits send SIGTERM. A parent that dies without handling it leaves its stopped ranks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    installed = []
    for spec in specs:
        if importlib.util.find_spec(spec.needs):
            installed.append(spec)
        else:
            print(f"{spec.family}: {spec.needs} is not installed; skipped", flush=True)
    groups, answers = [], {}
    try:
        for index, spec in enumerate(installed):
            command = [sys.executable, "-m", "benchmarks.worker", spec.module, spec.function, *spec.arguments]
            groups.append(WorkerGroup(partial(cluster.start, command, port=29400 + index)))
        for group in groups:
            group.wait_until_ready()
        for repeat in range(-warm_up, repeats):
            for spec, group in zip(installed, groups, strict=True):
                for contender in group.contenders:
                    answer = group.step(contender)
                    if repeat >= 0:
                        answers.setdefault((spec.family, contender), []).append(answer)
    finally:
        for group in groups:
            group.kill()
    return [report.row(family, name, measured) for (family, name), measured in answers.items()]
