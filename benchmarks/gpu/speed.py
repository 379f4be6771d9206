"""Checks 6 and 7: speed and memory of the training of a model with several microbatches, and the kernels of a step."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import runs
from benchmarks.gpu.check import CheckContext, Outcome, Unavailable
from benchmarks.gpu.ranks import in_process
from benchmarks.gpu.timing import device_of
from gpt4d.config import Config, GridSizes, compose
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.resolve import resolve
from gpt4d.trainer import Trainer

_STEPS, _LOGGED, _PROFILED = 15, 5, 8  # the last five steps are measured, and not profiled
_KERNELS = 10
_MEMORY_ERROR = 0.1
_CORPUS_TOKENS = {"cuda": 400_000, "cpu": 20_000}


@dataclass(frozen=True)
class Workload:
    """A model to train, and what passes."""

    model: str
    length: int
    micro_batches: tuple[int, ...]
    mfu: float
    vocabulary: int = 50257

    def overrides(self, rehearsal: bool) -> list[str]:
        """Return the overrides that select the model and the length of its sequences."""
        return runs.TINY_MODEL if rehearsal else [f"model={self.model}", f"train.seq_len={self.length}"]

    def write_corpus(self, context: CheckContext) -> list[str]:
        vocabulary = runs.TINY_VOCABULARY if context.rehearsal else self.vocabulary
        return runs.write_corpus(context.directory, vocabulary, _CORPUS_TOKENS[context.device_type])


GPT_1B3 = Workload("gpt_1b3", 2048, (4, 8, 16), 0.45)
GPT_125M = Workload("gpt_125m", 1024, (16, 32, 64), 0.25)


def check_1b3(context: CheckContext) -> Outcome:
    return _check(context, GPT_1B3, GPT_1B3.micro_batches[:2] if context.rehearsal else GPT_1B3.micro_batches)


def check_125m(context: CheckContext) -> Outcome:
    return _check(context, GPT_125M, GPT_125M.micro_batches[:1] if context.rehearsal else GPT_125M.micro_batches)


def _check(context: CheckContext, workload: Workload, micro_batches: Sequence[int]) -> Outcome:
    outcome, device = Outcome(), device_of(context.device_type)
    corpus, model = workload.write_corpus(context), workload.overrides(context.rehearsal)
    total_gib, reserved_gib = in_process(device_memory, device)
    measured = outcome.values["runs"] = []
    for micro_batch in micro_batches:
        machine = [f"cluster.memory_gib={total_gib}", f"cluster.reserved_gib={reserved_gib}"]
        words = [*model, *corpus, *machine, f"train.batch_size={micro_batch}", "train.precision=bf16"]
        config = resolve(compose(words), 1).config
        planned_gib = Estimate(config, GridSizes()).memory_gib(micro_batch)
        if planned_gib <= total_gib:
            overrides = [*words, f"run.dir={context.directory / str(micro_batch)}"]
            measured.append(_measure(config, overrides, device) | {"planned_gib": planned_gib - reserved_gib})
    if not measured:
        raise Unavailable(f"no microbatch fits into {total_gib:.0f} GiB; use a GPU with more memory")
    for run in measured:
        name = f"microbatch {run['micro_batch']}"
        outcome.require(None not in run["losses"] and not run["skipped"], f"{name}: a loss is not finite")
        error = run["memory_gib"] / run["planned_gib"] - 1
        text = f"{name}: {run['memory_gib']:.1f} GiB at the peak, {run['planned_gib']:.1f} planned"
        outcome.require(abs(error) <= _MEMORY_ERROR or context.rehearsal, text)
    best = outcome.values["best"] = max(measured, key=lambda run: run["tokens_per_s"])
    if best["mfu"] is not None:
        outcome.require(best["mfu"] >= workload.mfu, f"an MFU of {best['mfu']:.1%} is below {workload.mfu:.0%}")
    outcome.figure = ", ".join(_figure(run) for run in measured)
    return outcome


def best_run(context: CheckContext) -> dict[str, Any]:
    """Return check 6's run with the most tokens per second. Raises Unavailable if there is no result."""
    if "best" not in context.earlier.get(6, {}):
        raise Unavailable("check 6 has no result; run part=2 before")
    return context.earlier[6]["best"]


def _figure(run: dict[str, Any]) -> str:
    mfu = "no MFU" if run["mfu"] is None else f"MFU {run['mfu']:.1%}"
    memory = f"{run['memory_gib']:.1f} GiB ({run['planned_gib']:.1f} planned)"
    return f"{run['micro_batch']}: {run['step_time_s'] * 1e3:.0f} ms, {mfu}, {memory}"


def _measure(config: Config, overrides: list[str], device: torch.device) -> dict[str, Any]:
    """Train for a few steps, and return what the last of them took and the kernels of an earlier one."""
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
    """Return the kernels with the most time in a trace of one step: name, calls, ms, share of the step."""
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
