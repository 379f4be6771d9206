"""Contenders in different processes whose steps alternate.

Frameworks keep global state, so each has its own *worker group*: one process per rank, started once and alive for the
whole run. A machine whose speed drifts therefore drifts for all contenders alike. A group that waits for its turn is
stopped (SIGSTOP): blocking on standard input is not enough, since each of gloo's threads wakes up a hundred times per
second.

The parent writes a contender's name to every rank of its group. The ranks run one step of it, or several if the answer
contains ``steps``; rank 0 answers with one line of JSON. A worker module ends by calling ``serve(contenders)``. The
answer of ranks with virtual devices contains times only, since values computed there are meaningless.
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
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TextIO

from benchmarks import report
from benchmarks.cluster import EmulatedCluster, LocalHost

if TYPE_CHECKING:
    from gpt4d.testing.virtual_device import VirtualDevice

ContenderStep = Callable[[], Callable[[], dict]]
"""One step of a contender. The call is timed; the function it returns is called afterwards and returns the rest of
the answer, such as the loss."""


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
        """Run one step and return ``{"seconds": of the slowest rank, …}``.

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
        # When a rank fails, the others wait for it, so rank 0 may never answer.
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
    """A worker group to start: its framework's name, its module, the package it needs, command-line arguments."""

    family: str
    module: str
    needs: str = "torch"
    arguments: tuple[str, ...] = ()


def interleave(
    cluster: EmulatedCluster | LocalHost, specs: list[WorkerSpec], repeats: int, warm_up: int = 2
) -> list[dict]:
    """Run all contenders alternately, ``repeats`` times each, and return one row (``report.row``) per contender.

    Skips specs whose package is not installed. ``warm_up`` steps per contender run first and are not measured.
    """
    # Job limits send SIGTERM. A parent that dies without handling it would leave its stopped ranks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    installed = [spec for spec in specs if importlib.util.find_spec(spec.needs)]
    for spec in specs:
        if spec not in installed:
            print(f"{spec.family}: {spec.needs} is not installed; skipped", flush=True)
    groups, answers = [], {}
    try:
        for index, spec in enumerate(installed):
            command = [sys.executable, "-m", spec.module, *spec.arguments]
            groups.append(WorkerGroup(partial(cluster.start, command, port=29400 + index)))
        for group in groups:
            group.wait_until_ready()
        for turn in range(-warm_up, repeats):
            for spec, group in zip(installed, groups, strict=True):
                for contender in group.contenders:
                    answer = group.step(contender)
                    if turn >= 0:
                        answers.setdefault((spec.family, contender), []).append(answer)
    finally:
        for group in groups:
            group.kill()
    return [report.row(family, name, measured) for (family, name), measured in answers.items()]


def serve(
    contenders: Mapping[str, ContenderStep],
    answers_to: TextIO,
    device: "VirtualDevice | None" = None,
    lead_ins: Mapping[str, ContenderStep] | None = None,
) -> None:
    """Run the steps requested on standard input until it ends, on every rank. Needs a process group.

    Args:
        contenders: the turn of each contender.
        answers_to: where rank 0 writes the results of each turn, a line of JSON.
        device: what this rank computes on during a turn; None for a core of this machine.
        lead_ins: on virtual devices, whose turns are short, what precedes a contender's turn and is not measured.
    """
    import torch.distributed as dist

    def send_answer(answer: dict) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(answer), file=answers_to, flush=True)

    dist.barrier()
    send_answer({"contenders": list(contenders)})
    for line in sys.stdin:
        step, lead_in = contenders[line.strip()], (lead_ins or {}).get(line.strip())
        if device and lead_in:
            with device:
                collect_results = lead_in()
                device.synchronize()
            collect_results()
        dist.barrier()
        start = time.perf_counter()
        with device or nullcontext():
            collect_results = step()
            if device:
                device.synchronize()
            dist.barrier()  # so that the time is that of the slowest rank
        seconds = time.perf_counter() - start
        answer = collect_results()
        steps = answer.pop("steps", 1)
        if device:
            answer = _virtual_results(answer, device.report(), steps)
        send_answer({"seconds": seconds / steps, **answer})


def _virtual_results(answer: dict, device_report: dict, steps: int) -> dict:
    """Return what has a meaning on virtual devices: times, and the largest figures of all ranks' reports.

    ``cpu_bound``: the processor was the bottleneck on a rank. Every rank calls it.
    """
    import torch
    import torch.distributed as dist

    busy_s, late_s = device_report["busy_s"] / steps, device_report["host_late_s"]
    figures = torch.tensor([busy_s, late_s / device_report["seconds"], device_report["cpu_bound"]])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    busy_s, late_share, cpu_bound = figures.tolist()
    results = {"busy_s": busy_s, "host_late_share": late_share, "cpu_bound": bool(cpu_bound)}
    return results | {key: value for key, value in answer.items() if key.endswith("_s")}


def share_process_groups() -> None:
    """Make ``new_group`` return one shared process group per set of ranks from now on.

    Each gloo group has a polling thread, even when unused; megatron alone would have ninety on each rank.
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
    """Return standard output for answers only, and redirect what libraries print from now on to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
