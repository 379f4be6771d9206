"""The processes of a worker group: they build contenders and run their steps on request.

    python -m benchmarks.worker benchmarks.adapters.gpt4d training [key=value …]

calls the function ``training``, which returns the contenders, with the settings that its annotation names. The ranks
read the name of a contender from standard input and run one step of it, or several steps if the answer contains
``steps``. Rank 0 answers with one line of JSON.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import NamedTuple, TextIO, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import from_arguments
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch

Step = Callable[[], Callable[[], dict]]
"""One step of a contender. The call is timed; the function it returns is called afterwards and returns the rest of
the answer, such as the loss."""


class Contender(NamedTuple):
    """A run of a contender, and the unmeasured work that precedes a run on virtual devices, where runs are short."""

    step: Step
    lead_in: Step | None = None


def serve(contenders: Mapping[str, Contender], answers_to: TextIO, device: VirtualDevice | None = None) -> None:
    """Run the steps requested on standard input until it ends, on every rank. Needs a process group.

    Args:
        contenders: contenders by name.
        answers_to: file to which rank 0 writes the answer of each run as a line of JSON.
        device: device of this rank during a run; None for a core of this machine.
    """

    def send_answer(answer: dict) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(answer), file=answers_to, flush=True)

    dist.barrier()
    send_answer({"contenders": list(contenders)})
    for line in sys.stdin:
        contender = contenders[line.strip()]
        if device and contender.lead_in:
            with device:
                collect_results = contender.lead_in()
                device.synchronize()
            collect_results()
        dist.barrier()
        start = time.perf_counter()
        with device or nullcontext():
            collect_results = contender.step()
            if device:
                device.synchronize()
            dist.barrier()  # so that the slowest rank determines the time
        seconds = time.perf_counter() - start
        answer = collect_results()
        steps = answer.pop("steps", 1)
        if device:
            answer = _virtual_results(answer, device.report(), steps)
        send_answer({"seconds": seconds / steps, **answer})


def _virtual_results(answer: dict, device_report: dict, steps: int) -> dict:
    """Return the times of an answer, and the maxima over all ranks' reports. Values mean nothing on virtual devices.

    ``cpu_bound``: the processor was the bottleneck on a rank. Every rank calls it.
    """
    busy_s, late_s = device_report["busy_s"] / steps, device_report["host_late_s"]
    figures = torch.tensor([busy_s, late_s / device_report["seconds"], device_report["cpu_bound"]])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    busy_s, late_share, cpu_bound = figures.tolist()
    results = {"busy_s": busy_s, "host_late_share": late_share, "cpu_bound": bool(cpu_bound)}
    return results | {key: value for key, value in answer.items() if key.endswith("_s")}


def repeat_step(step: Step, steps: int, finish: Callable[[], None] = lambda: None) -> Step:
    """Return a run of ``steps`` steps; ``finish`` waits for work that the last step has left in flight."""

    def run() -> Callable[[], dict]:
        for _ in range(steps):
            collect_results = step()
        finish()
        return lambda: _per_step(collect_results(), steps)

    return run


def _per_step(answer: dict, steps: int) -> dict:
    exposed = {axis: seconds / steps for axis, seconds in answer.get("exposed_s", {}).items()}
    return {**answer, "steps": steps} | ({"exposed_s": exposed} if exposed else {})


def share_process_groups(distinct: bool = False) -> Callable[[], None]:
    """Make ``new_group`` return one shared process group per set of ranks from now on.

    Each gloo group has a polling thread, even when unused. Without sharing, megatron alone has ninety on each rank.

    Args:
        distinct: groups of one contender are distinct even if they have the same ranks, because the contender starts
            their collectives on several threads. The returned function is then called before each contender is built.
    """
    new_group, groups = dist.new_group, {}
    earlier: Counter[tuple[int, ...]] = Counter()  # groups of this contender with the same ranks

    def new_or_shared(ranks=None, *_, use_local_synchronization: bool = False, **__) -> dist.ProcessGroup:
        ranks = tuple(range(dist.get_world_size()) if ranks is None else map(int, ranks))
        key = ranks, earlier[ranks]
        if distinct:
            earlier[ranks] += 1
        if key not in groups:
            groups[key] = new_group(ranks, use_local_synchronization=use_local_synchronization)
        return groups[key]

    dist.new_group = distributed_c10d.new_group = device_mesh.new_group = new_or_shared
    return earlier.clear


def redirect_stdout_for_answers() -> TextIO:
    """Return standard output for answers only, and redirect the output of libraries to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(module: str, function: str, *arguments: str) -> None:
    answers, build = redirect_stdout_for_answers(), getattr(import_module(module), function)
    settings = from_arguments(get_type_hints(build)["settings"], list(arguments))
    device = settings.virtual_device()
    with process_group(Launch.from_environment(), torch.device(settings.device)):
        with device or nullcontext():
            contenders = build(settings, device)
        serve(contenders, answers, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
