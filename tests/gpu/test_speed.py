"""Checks 6 and 7: speed and memory of the training of a model with several microbatches, and the kernels of a step."""

import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpt4d.config import GridSizes
from gpt4d.config.machine import this_machine
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.resolve import resolve
from gpt4d.trainer import Trainer
from tests.gpu import compiling, runs
from tests.gpu.check import Check, Unavailable
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3, GPT_125M, Workload
from tests.gpu.usage import device_memory, reserved_gib
from tests.support.settings import configured

_STEPS, _LOGGED, _PROFILED = 15, 5, 8  # the last five steps are measured, and not profiled
_FIRST = 3  # steps in which functions may be compiled
_KERNELS = 10
_MEMORY_ERROR = 0.1
_MAX_IDLE = 0.05  # share of a step of a large model
_CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}  # kinds of events in a trace


@pytest.mark.gpu(number=6, part=2, limit_s=155, functions=16, work_s=60)
def test_speed_and_memory_of_gpt_1b3(check: Check) -> None:
    _check(check, GPT_1B3, GPT_1B3.micro_batches)
    idle = check.values["best"]["idle_share"]
    check.require(idle <= _MAX_IDLE or check.rehearsal, f"the device is idle for {idle:.1%} of a step")


@pytest.mark.gpu(number=7, part=2, limit_s=125, functions=16, work_s=30)
def test_speed_and_memory_of_gpt_125m(check: Check) -> None:
    _check(check, GPT_125M, GPT_125M.micro_batches[:1] if check.rehearsal else GPT_125M.micro_batches)


def _check(check: Check, workload: Workload, micro_batches: Sequence[int]) -> None:
    device, corpus = check.device, workload.write_corpus(check)
    total_gib, used_gib = in_process(device_memory, device)
    measured = check.values["runs"] = []
    for micro_batch in micro_batches:
        overrides = [
            *workload.overrides(check.rehearsal),
            f"cluster.memory_gib={total_gib}",
            f"cluster.reserved_gib={used_gib}",
            f"train.batch_size={micro_batch}",
            "train.precision=bf16",
        ]
        planned_gib, cache_layers = in_process(_plan, [*overrides, *corpus])
        if planned_gib <= total_gib:
            run = _measure(check, [*overrides, *corpus], micro_batch)
            run |= {"overrides": overrides, "cache_layers": cache_layers, "planned_gib": planned_gib - used_gib}
            measured.append(run)
    if not measured:
        raise Unavailable(f"no microbatch fits into {total_gib:.0f} GiB; use a GPU with more memory")
    libraries_gib = this_machine().reserved_gib  # as cluster=auto plans for
    for run in measured:
        name = f"microbatch {run['micro_batch']}"
        check.require(None not in run["losses"] and not run["skipped"], f"{name}: a loss is not finite")
        error = run["memory_gib"] / run["planned_gib"] - 1
        text = f"{name}: {run['memory_gib']:.1f} GiB at the peak, {run['planned_gib']:.1f} planned"
        check.require(abs(error) <= _MEMORY_ERROR or check.rehearsal, text)
        text = f"{name}: CUDA and its libraries take {run['libraries_gib']:.2f} GiB, {libraries_gib:g} planned"
        check.require(run["libraries_gib"] <= libraries_gib, text)
        text = f"{name}: {run['late_graphs']} functions are compiled after step {_FIRST}"
        check.require(run["late_graphs"] == 0, text)
    best = check.values["best"] = max(measured, key=lambda run: run["tokens_per_s"])
    if best["mfu"] is not None:
        check.require(best["mfu"] >= workload.mfu, f"an MFU of {best['mfu']:.1%} is below {workload.mfu:.0%}")
    check.figure = ", ".join(_figure(run) for run in measured)


def _plan(overrides: list[str]) -> tuple[float, Any]:
    """Return the planned memory in GiB, and the blocks with cached weights."""
    config = resolve(configured(overrides), 1).config
    return Estimate(config, GridSizes()).memory_gib(config.train.batch_size), config.parallel.cache_layers


def _figure(run: dict[str, Any]) -> str:
    mfu = "no MFU" if run["mfu"] is None else f"MFU {run['mfu']:.1%}"
    times = f"{run['step_time_s'] * 1e3:.0f} ms (host {run['host_s'] * 1e3:.0f} ms, idle {run['idle_share']:.1%})"
    memory = f"{run['memory_gib']:.1f} GiB ({run['planned_gib']:.1f} planned, {run['reserved_gib']:.1f} reserved)"
    return f"{run['micro_batch']}: {times}, {mfu}, {memory}"


def _measure(check: Check, overrides: list[str], micro_batch: int) -> dict[str, Any]:
    """Train for a few steps, and return the metrics of the last step and the kernels of an earlier step."""
    run_dir, device = check.directory / str(micro_batch), check.device
    steps = [f"train.steps={_STEPS}", f"logging.every={_LOGGED}", f"profile.steps={_PROFILED}", f"run.dir={run_dir}"]
    report = runs.train([*overrides, *steps], device, _observe)
    *_, last = runs.logged_steps(run_dir)
    (trace,) = run_dir.glob("traces/*/rank_00000.json.gz")
    recorded = device_events(trace, _CATEGORIES[device.type])
    return {
        "micro_batch": micro_batch,
        "losses": list(runs.losses(run_dir).values()),
        **{key: last[key] for key in ("skipped", "step_time_s", "tokens_per_s", "mfu", "memory_gib", "data_wait_s")},
        **report,
        "launches": len(recorded),
        "idle_share": idle_share(recorded),
        "kernels": kernels(recorded, last["step_time_s"]),
    }


def _observe(trainer: Trainer) -> Callable[[], dict[str, Any]]:
    """Time the host's part of each step, and return a function of this time, memory and numbers of compiled functions.

    The host's time can be as long as the step, because the host waits while the queue of launches is full.
    """
    runs.never_save(trainer)
    step, seconds, graphs = trainer._step, list[float](), list[int]()

    def observed(*args: Any) -> Any:
        graphs.append(compiling.num_graphs())
        started = time.perf_counter()
        result = step(*args)
        seconds.append(time.perf_counter() - started)
        return result

    trainer._step = observed  # type: ignore[method-assign]

    def report() -> dict[str, Any]:
        _, used_gib = device_memory(trainer.device)
        return {
            "host_s": statistics.median(seconds[-_LOGGED:]),
            "reserved_gib": reserved_gib(trainer.device, peak=True),
            "libraries_gib": used_gib - reserved_gib(trainer.device),
            "graphs": compiling.num_graphs(),
            "late_graphs": compiling.num_graphs() - graphs[_FIRST],
        }

    return report


def device_events(trace: Path, categories: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of these categories in a trace of one step."""
    with gzip.open(trace, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("cat") in categories]


def idle_share(recorded: Sequence[dict[str, Any]]) -> float:
    """Return the share of the time from the first event to the last in which no event lasts."""
    first = reached = min(event["ts"] for event in recorded)
    idle = 0.0
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in recorded):
        idle += max(0.0, start - reached)
        reached = max(reached, stop)
    return idle / (reached - first)


def kernels(recorded: Sequence[dict[str, Any]], step_s: float) -> list[dict[str, Any]]:
    """Return the longest kernels of one step: name, calls, ms, share of the step."""
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded:
        microseconds[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    return [
        {"name": name, "calls": calls[name], "ms": total / 1e3, "share": total / 1e6 / step_s}
        for name, total in microseconds.most_common(_KERNELS)
    ]
