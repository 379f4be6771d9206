"""Contenders that take turns, step by step, although they live in different processes.

Frameworks keep global state, so each has a *team* of its own: one process a rank, started once and alive for the whole
run. A machine that drifts drifts for all contenders alike. A team that waits for its turn is stopped (SIGSTOP), since
blocking on standard input is not enough: gloo's threads wake up a hundred times a second each.

The parent writes a contender's name to every rank of its team; the ranks do one step of it, or as many as the answer
says; rank 0 answers with one line of JSON. A team is a module that ends in ``serve(contenders)``.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TextIO

from benchmarks import report
from benchmarks.cluster import Cluster, LocalHost

Step = Callable[[], Callable[[], dict]]
"""One step of a contender. It is timed; what it returns is called afterwards, and gives what else there is to tell."""


class Team:
    """A framework's rank processes, seen from the parent. ``start`` starts them, given Popen's pipes, rank 0 first."""

    def __init__(self, start: Callable[..., list[subprocess.Popen]], timeout_s: float = 300):
        self.timeout_s = timeout_s
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 – a pipe that nobody reads would fill up
        self.processes = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.contenders: list[str] = []

    def wait_until_ready(self) -> None:
        self.contenders = self._answer()["contenders"]
        self._signal(signal.SIGSTOP)

    def step(self, contender: str) -> dict:
        """One step: ``{"seconds": of the slowest rank, …}``. RuntimeError with what a rank said if one has ended."""
        self._signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.stdin.write(contender + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                process.wait()
                self._check()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def _answer(self) -> dict:
        stdout, until = self.processes[0].stdout, time.monotonic() + self.timeout_s
        # A rank that failed leaves the others waiting for it: rank 0 may have nothing to say, ever.
        while not select.select([stdout], [], [], 1.0)[0]:
            self._check()
            if time.monotonic() > until:
                raise RuntimeError(f"no answer within {self.timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            self.processes[0].wait()
            self._check()
        return json.loads(line)

    def _check(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self.errors.seek(0)
                raise RuntimeError(f"rank {rank} of {process.args} ended:\n{self.errors.read()[-4000:]}")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Entry(NamedTuple):
    """A team that is to take part: the name of its framework, its module, and the package that it needs."""

    family: str
    module: str
    needs: str = "torch"
    arguments: tuple[str, ...] = ()


def interleave(cluster: Cluster | LocalHost, entries: list[Entry], repeats: int, warm_up: int = 2) -> list[dict]:
    """A row (``report.row``) for each contender of the teams that can take part, after steps that do not count."""
    # What ends a run that takes too long asks for it with SIGTERM; stopped ranks would outlive a parent that just dies.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    present = [entry for entry in entries if importlib.util.find_spec(entry.needs)]
    for entry in entries:
        if entry not in present:
            print(f"{entry.family}: {entry.needs} is not installed, left out", flush=True)
    teams, found = [], {}
    try:
        for number, entry in enumerate(present):
            command = [sys.executable, "-m", entry.module, *entry.arguments]
            teams.append(Team(partial(cluster.start, command, port=29400 + number)))
        for team in teams:
            team.wait_until_ready()
        for turn in range(-warm_up, repeats):
            for entry, team in zip(present, teams, strict=True):
                for contender in team.contenders:
                    answer = team.step(contender)
                    if turn >= 0:
                        found.setdefault((entry.family, contender), []).append(answer)
    finally:
        for team in teams:
            team.end()
    return [report.row(family, name, answers) for (family, name), answers in found.items()]


def serve(contenders: Mapping[str, Step], answers_to: TextIO) -> None:
    """A rank's life: steps as they are asked for, until standard input ends. A process group must exist."""
    import torch.distributed as dist

    def tell(answer: dict) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(answer), file=answers_to, flush=True)

    dist.barrier()
    tell({"contenders": list(contenders)})
    for line in sys.stdin:
        step = contenders[line.strip()]
        dist.barrier()
        start = time.perf_counter()
        more = step()
        dist.barrier()  # the step of the slowest rank
        seconds = time.perf_counter() - start
        answer = more()
        tell({"seconds": seconds / answer.pop("steps", 1), **answer})


def share_groups() -> None:
    """From now on a team's contenders have one process group for the same ranks, not one each.

    Each of gloo's groups has a thread that polls, whoever uses it, and megatron alone would have ninety on each rank.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    new_group, groups = dist.new_group, {}

    def new_or_shared(ranks=None, *_, use_local_synchronization: bool = False, **__) -> dist.ProcessGroup:
        ranks = tuple(range(dist.get_world_size()) if ranks is None else map(int, ranks))
        if ranks not in groups:
            groups[ranks] = new_group(ranks, use_local_synchronization=use_local_synchronization)
        return groups[ranks]

    dist.new_group = distributed_c10d.new_group = device_mesh.new_group = new_or_shared


def redirect_stdout_for_answers() -> TextIO:
    """Standard output, for the answers alone: what libraries print from now on goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
