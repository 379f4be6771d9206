"""Checks 6 and 7: speed and memory of the training of a model with several microbatches, and the kernels of a step."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt4d.config import Config, GridSizes, compose
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.resolve import resolve
from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check, Unavailable
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3, GPT_125M, Workload

_STEPS, _LOGGED, _PROFILED = 15, 5, 8  # the last five steps are measured, and not profiled
_KERNELS = 10
_MEMORY_ERROR = 0.1


@pytest.mark.gpu(number=6, part=2, limit_s=200)
def test_speed_and_memory_of_gpt_1b3(check: Check) -> None:
    _check(check, GPT_1B3, GPT_1B3.micro_batches[:2] if check.rehearsal else GPT_1B3.micro_batches)


@pytest.mark.gpu(number=7, part=2, limit_s=100)
def test_speed_and_memory_of_gpt_125m(check: Check) -> None:
    _check(check, GPT_125M, GPT_125M.micro_batches[:1] if check.rehearsal else GPT_125M.micro_batches)


def _check(check: Check, workload: Workload, micro_batches: Sequence[int]) -> None:
    device = check.device
    corpus, model = workload.write_corpus(check), workload.overrides(check.rehearsal)
    total_gib, reserved_gib = in_process(device_memory, device)
    measured = check.values["runs"] = []
    for micro_batch in micro_batches:
        machine = [f"cluster.memory_gib={total_gib}", f"cluster.reserved_gib={reserved_gib}"]
        words = [*model, *corpus, *machine, f"train.batch_size={micro_batch}", "train.precision=bf16"]
        config = resolve(compose(words), 1).config
        planned_gib = Estimate(config, GridSizes()).memory_gib(micro_batch)
        if planned_gib <= total_gib:
            overrides = [*words, f"run.dir={check.directory / str(micro_batch)}"]
            measured.append(_measure(config, overrides, device) | {"planned_gib": planned_gib - reserved_gib})
    if not measured:
        raise Unavailable(f"no microbatch fits into {total_gib:.0f} GiB; use a GPU with more memory")
    for run in measured:
        name = f"microbatch {run['micro_batch']}"
        check.require(None not in run["losses"] and not run["skipped"], f"{name}: a loss is not finite")
        error = run["memory_gib"] / run["planned_gib"] - 1
        text = f"{name}: {run['memory_gib']:.1f} GiB at the peak, {run['planned_gib']:.1f} planned"
        check.require(abs(error) <= _MEMORY_ERROR or check.rehearsal, text)
    best = check.values["best"] = max(measured, key=lambda run: run["tokens_per_s"])
    if best["mfu"] is not None:
        check.require(best["mfu"] >= workload.mfu, f"an MFU of {best['mfu']:.1%} is below {workload.mfu:.0%}")
    check.figure = ", ".join(_figure(run) for run in measured)


def _figure(run: dict[str, Any]) -> str:
    mfu = "no MFU" if run["mfu"] is None else f"MFU {run['mfu']:.1%}"
    memory = f"{run['memory_gib']:.1f} GiB ({run['planned_gib']:.1f} planned)"
    return f"{run['micro_batch']}: {run['step_time_s'] * 1e3:.0f} ms, {mfu}, {memory}"


def _measure(config: Config, overrides: list[str], device: torch.device) -> dict[str, Any]:
    """Train for a few steps, and return the metrics of the last step and the kernels of an earlier step."""
    steps = [f"train.steps={_STEPS}", f"logging.every={_LOGGED}", f"profile.steps={_PROFILED}"]
    runs.train([*overrides, *steps], device, _never_save)
    run_dir = Path(next(text for text in overrides if text.startswith("run.dir=")).removeprefix("run.dir="))
    *_, last = runs.logged_steps(run_dir)
    (trace,) = run_dir.glob("traces/*/rank_00000.json.gz")
    return {
        "micro_batch": config.train.batch_size,
        "losses": list(runs.losses(run_dir).values()),
        **{key: last[key] for key in ("skipped", "step_time_s", "tokens_per_s", "mfu", "memory_gib", "data_wait_s")},
        "kernels": kernels(trace, last["step_time_s"], "kernel" if device.type == "cuda" else "cpu_op"),
    }


def _never_save(trainer: Trainer) -> None:
    runs.save_only_at(None)


def kernels(trace: Path, step_s: float, category: str) -> list[dict[str, Any]]:
    """Return the longest kernels in a trace of one step: name, calls, ms, share of the step."""
    with gzip.open(trace, "rt") as file:
        recorded = json.load(file)["traceEvents"]
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded:
        if event.get("cat") == category:
            microseconds[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    return [
        {"name": name, "calls": calls[name], "ms": total / 1e3, "share": total / 1e6 / step_s}
        for name, total in microseconds.most_common(_KERNELS)
    ]


def device_memory(device: torch.device) -> tuple[float, float]:
    """Return the GiB of a device's memory, and those that are in use before the first tensor."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total / GIB, (total - free) / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 0.0
