"""Checks 6, 7, 10 and 11: speed, memory and kernels of models, the cost of some decisions, and the planner's times.

6 and 7: speed and memory of the training of a model with several microbatches, and the kernels of a step. 10: cost of
some decisions, each reverted in alternating steps of gpt_1b3. 11: the planner predicts the step times of check 6, from
a calibration of this device and without one.
"""

import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.config.machine import this_machine
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import linear
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.parallel.stage import Stage
from gpt4d.planner import calibrate
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.resolve import resolve
from gpt4d.step import TrainStep, build_stage
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.gpu import compiling, runs
from tests.gpu.check import Check, Unavailable
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3, GPT_125M, Workload, measured_runs
from tests.gpu.usage import device_memory, reserved_gib, seconds_of
from tests.support.settings import configured

_STEPS, _LOGGED, _PROFILED = 15, 5, 8  # the last five steps are measured, and not profiled
_FIRST = 3  # steps in which functions may be compiled
_KERNELS = 10
_MEMORY_ERROR = 0.1
_MAX_IDLE = 0.05  # share of a step of a large model
_CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}  # kinds of events in a trace
_ROUNDS = 5
_VARIANT_STEPS = {"cuda": 3, "cpu": 1}  # steps of each variant in a round
_WARM_UP = 2
_MAX_COST = 0.05  # maximum share of a step that a decision for precision costs
TODAY = "today"
_uses: Counter[str] = Counter()  # calls of each replaced function
_ERROR = 0.2
# In a rehearsal the calibration only has to run.
_SHORT = {
    "MIN_MEASURED_S": 0.0, "ROUNDS": 1, "MATRIX_SIZE": {"cpu": 64}, "ATTENTION_SHAPE": {"cpu": (1, 16, 2, 8)},
    "LARGE_MODEL": GPT2Config(layers=2, hidden=128, heads=4, vocab_size=128, max_positions=32),
}  # fmt: skip


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
            *workload.overrides(check.rehearsal), f"cluster.memory_gib={total_gib}",
            f"cluster.reserved_gib={used_gib}", f"train.batch_size={micro_batch}", "train.precision=bf16",
        ]  # fmt: skip
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
    """Time the host's part of each step. Return a function of this time, memory and numbers of compiled functions."""
    runs.never_save(trainer)
    step, seconds, graphs = trainer.step, list[float](), list[int]()

    def observed(*args: Any) -> Any:
        graphs.append(compiling.num_graphs())
        started = time.perf_counter()
        result = step(*args)
        seconds.append(time.perf_counter() - started)
        return result

    trainer.step = observed  # type: ignore[method-assign]

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


@pytest.mark.gpu(number=10, part=3, limit_s=110, work_s=90)
def test_gradients_in_fp32_cost_little_of_a_step(check: Check) -> None:
    device, best = check.device, measured_runs(check)["best"]
    plan, micro_batch = validate(configured([*best["overrides"], "optim.lr=1e-5"]), 1), best["micro_batch"]
    config = plan.config
    check.values["cache_layers"] = config.parallel.cache_layers
    stage = build_stage(plan, Grid.single_device(), device)
    step = TrainStep(stage, whole_model(lambda module, batch: cast(Any, module).loss_sum(*batch)), config.optim)
    ids = torch.randint(cast(Any, config.model).vocab_size, (micro_batch, config.train.seq_len), device=device)
    batch = ids, ids.roll(-1, 1), torch.arange(micro_batch, device=device)
    recomputed = {0: registry.describe(config.model).layer_weights(recompute=True)}
    variants: dict[str, Callable[[], AbstractContextManager]] = {
        TODAY: nullcontext,
        "weight gradients in bf16": lambda: patch.object(linear, "product", _rounded_product),
        "norm gradients in bf16": lambda: patch.object(LayerNormSpec, "forward", _norm_with_rounded_gradients),
        "full activation checkpointing": lambda: _recompute(step, recomputed),
        "selective activation checkpointing": lambda: _changed(stage, recompute_inputs=True),
        "no compiled functions": lambda: patch.object(compile, "enabled", False),
    }
    seconds = _alternate(variants, lambda: step([batch], 1, ids.numel(), 1e-5), device)
    figures = [f"{statistics.median(seconds[TODAY]) * 1e3:.0f} ms"]
    for name in list(variants)[1:]:
        changes = [variant / today - 1 for today, variant in zip(seconds[TODAY], seconds[name], strict=True)]
        change = statistics.median(changes)
        check.values[name] = {"change": change, "min": min(changes), "max": max(changes)}
        figures.append(f"{name} {change:+.1%} ({min(changes):+.1%} to {max(changes):+.1%})")
        if name.endswith("bf16"):
            check.require(_uses[name] > 0, f"{name}: the variant replaces nothing that a step calls")
            cost = 1 / (1 + change) - 1
            check.require(cost < _MAX_COST or check.rehearsal, f"{name}: gradients in fp32 cost {cost:.1%} of a step")
    check.values |= {"micro_batch": micro_batch, "seconds": seconds}
    check.figure = ", ".join(figures)


def _alternate(
    variants: dict[str, Callable[[], AbstractContextManager]], work: Callable[[], object], device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of ``work`` in each round, by variant: the machine's speed drifts for all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, _ROUNDS):
        for name, variant in variants.items():
            with variant():
                measured = seconds_of(work, device, _WARM_UP if number < 0 else _VARIANT_STEPS[device.type], warm_up=0)
            if number >= 0:
                seconds[name].append(measured)
    return seconds


def _rounded_product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None
) -> torch.Tensor:
    _uses["weight gradients in bf16"] += 1
    return (a @ b).to(dtype) if added_to is None else added_to.add_(a @ b)


def _norm_with_rounded_gradients(
    spec: LayerNormSpec, layer: Any, x: torch.Tensor, branch: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize as a LayerNorm does on a grid with y=1, with parameters, and thus their gradients, in x's dtype."""
    _uses["norm gradients in bf16"] += 1
    x = x if branch is None else x + branch
    return x, F.layer_norm(x, layer.weight.shape, layer.weight.to(x.dtype), layer.bias.to(x.dtype), spec.epsilon)


def _changed(stage: Stage, **settings: bool) -> AbstractContextManager:
    """Change how the stage's layers compute in training."""
    return patch.object(Layer, "current_pass", replace(stage.weights.context.training, **settings))


@contextmanager
def _recompute(step: TrainStep, layer_weights: Any) -> Iterator[None]:
    stage = step.stage
    with _changed(stage, recompute=True), patch.object(stage, "layer_weights", layer_weights):
        runtime = StageRuntime(stage, step.reducer, step.runtime.compute)  # a runtime plans the order of weights once
        with patch.object(step, "runtime", runtime):
            yield


@pytest.mark.gpu(number=11, part=3, limit_s=130, work_s=60)
def test_the_planner_predicts_the_step_times(check: Check) -> None:
    measured, path = measured_runs(check)["runs"], check.directory / "here.yaml"
    in_process(_calibrate, path, check.rehearsal)
    figures, rows = [], []
    for cluster in (str(path), "auto"):
        name = "cluster=auto" if cluster == "auto" else "calibrated"
        for run in measured:
            batch = [f"train.batch_size={run['micro_batch']}", "train.precision=bf16", f"cluster={cluster}"]
            config = validate(configured([*GPT_1B3.overrides(check.rehearsal), *batch]), 1).config
            planned_s = Estimate(config, GridSizes()).step(run["micro_batch"]).step_time_s
            measured_s = run["step_time_s"]
            error = planned_s / measured_s - 1
            times = f"{planned_s * 1e3:.0f} ms planned, {measured_s * 1e3:.0f} ms measured ({error:+.1%})"
            figures.append(f"{name}, microbatch {run['micro_batch']}: {times}")
            check.require(abs(error) <= _ERROR or check.rehearsal, f"{figures[-1]}: the planned time is off")
            row = {"micro_batch": run["micro_batch"], "planned_s": planned_s, "measured_s": measured_s}
            rows.append(row | {"cluster": asdict(config.cluster)})
    check.values["predictions"] = rows
    check.figure = "; ".join(figures)


def _calibrate(path: Path, rehearsal: bool) -> None:
    if rehearsal:
        vars(calibrate).update(_SHORT)
    calibrate.main([f"out={path}"])
