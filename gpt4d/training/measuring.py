"""Measurements of the training loop: times, memory and communication of each logged step, and validation losses."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from gpt4d.checkpoint.checkpoint_dir import Progress
from gpt4d.config import HELD_OUT
from gpt4d.config.machine import peak_flops
from gpt4d.optim.monitor import StepMetrics
from gpt4d.parallel.layers.routing import routing_summary
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.planner.estimate import GIB
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.workload import training_state
from gpt4d.runs.logger import RunFiles, of_loss
from gpt4d.runtime import gpu
from gpt4d.runtime.consensus import all_gather_json
from gpt4d.step import TrainStep
from gpt4d.task.task import Task, ValidationSet

_LATE = 1.5  # times the median step time
_LATE_TIMES = 5  # consecutive lines of metrics.jsonl after which a straggler is reported


class StepMeter:
    """Measures the steps between two calls of ``restart``.

    Args:
        plan: the configuration and its grid.
        stage: the stage whose axes count their traffic.
        task: the task, which provides the unit and the time spent waiting for data.
        hosts: each rank's host, to name stragglers.
        log: the log to which stragglers are reported.
    """

    def __init__(self, plan: ParallelPlan, stage: Stage, task: Task, hosts: list[str], log: RunFiles):
        self.stage, self.task, self.log = stage, task, log
        self.devices = plan.devices
        self.stragglers = StragglerDetector(hosts)
        self.sample_flops = plan.description.training_flops(1, plan.config.train.seq_len)
        own = plan.description.stage(plan.stages[stage.index].parts)
        element = stage.weights.context.compute_dtype.itemsize
        state = training_state(own, stage.grid.sizes, plan.config.optim, element)
        self.state_gib = {kind: nbytes / GIB for kind, nbytes in state.items()}

    def restart(self, progress: Progress) -> None:
        """Start to measure the steps after ``progress``."""
        self._started, self._timed_steps = time.perf_counter(), 0
        self._step, self._sample = progress.step, progress.samples
        self.task.waited_s = 0.0
        for axis in self.stage.axes.values():
            axis.traffic.read()

    def time_communication(self, timed: bool) -> None:
        """Measure durations and exposed times of the next step's collectives, or only their bytes."""
        self._timed_steps += timed
        for axis in self.stage.axes.values():
            axis.traffic.timed = timed

    def measure(self, step: StepMetrics, progress: Progress) -> dict:
        """Return the line of metrics.jsonl for the steps since ``restart``; times and bytes are per step.

        Times of communication are means over the timed steps, or zero without timed steps. All ranks call it.
        """
        task, device, steps = self.task, self.stage.weights.device, progress.step - self._step
        seconds = (time.perf_counter() - self._started) / steps
        samples_per_s = (progress.samples - self._sample) / steps / seconds
        flops = self.sample_flops * samples_per_s / self.devices
        peak = peak_flops(device)
        per_step = {"bytes": steps, "exposed_s": max(1, self._timed_steps), "hidden_s": max(1, self._timed_steps)}
        totals = {name: axis.traffic.read() for name, axis in self.stage.axes.items()}
        comm = {name: {key: total[key] / per_step[key] for key in total} for name, total in totals.items()}
        exposed_s = sum(means["exposed_s"] for means in comm.values())
        busy_s = all_gather_json(seconds - exposed_s, f"reading the metrics of step {progress.step}")
        busy, late = self.stragglers.note(busy_s)
        if late:
            host = self.stragglers.hosts[busy["slowest"]]
            self.log.event("straggler", f"LATE: {late}", step=progress.step, host=host, **busy)
        ranks = self.stage.weights.context.expert_axis.size
        moe = {"moe": routing_summary(step.routing, ranks)} if len(step.routing) else {}
        return {
            "step": progress.step,
            "loss": step.loss,
            "grad_norm": step.norm,
            "lr": step.lr,
            "skipped": progress.skipped,
            task.unit: progress.units,
            "epoch": progress.samples / task.samples,
            "step_time_s": seconds,
            "busy_s": busy,
            "data_wait_s": task.waited_s / steps,
            f"{task.unit}_per_s": samples_per_s * task.units_per_sample,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "memory_gib": gpu.peak_memory_gib(device),
            "memory": {"after_step": gpu.used_memory_gib(device), **self.state_gib},
            "comm": comm,
            **moe,
            **task.training_values(self._sample, progress.samples),
        }


class Validation:
    """Computes and reports the losses of the validation sets."""

    def __init__(self, plan: ParallelPlan, task: Task, train_step: TrainStep, log: RunFiles):
        self.plan, self.task, self.train_step, self.log = plan, task, train_step, log

    def report(self, progress: Progress) -> dict[str, float]:
        """Report the losses of the validation sets, and return the mean loss per counted unit of each set.

        With ``optim.validate_averages``, also report the losses of the averaged weights.
        """
        sets = {name: data for name, data in self.task.validation.items() if data.steps}
        results = {name: self.evaluate(data) for name, data in sets.items()}
        if not results:
            return {}
        losses = {name: result["loss"] for name, result in results.items()}
        if self.plan.config.optim.validate_averages:
            with self.task.averaged():
                for name, data in sets.items():
                    results[name]["average_loss"] = self.evaluate(data)["loss"]
        held_out: Mapping[str, float | None] = results.pop(HELD_OUT, {"loss": None})
        shown = [f"{name} {loss:.4f}".removeprefix(f"{HELD_OUT} ") for name, loss in losses.items()]
        if "average_loss" in held_out:
            shown[0] += f", of averaged weights {held_out['average_loss']:.4f}"
        message = f"step {progress.step}/{self.plan.config.train.steps}  validation loss {', '.join(shown)}"
        values: Mapping[str, Any] = {**held_out, "sets": results} if results else held_out
        self.log.event("validation", message, **progress.values(self.task.unit), **values)
        return losses

    def evaluate(self, data: ValidationSet) -> dict[str, float]:
        """Return the loss per counted unit of a validation set; for text also its perplexity and bits per byte."""
        batches = chain.from_iterable(map(data.batches, range(data.steps)))
        total = self.train_step.evaluate(batches, data.steps * self.plan.microbatches).item()
        return of_loss(total, data.units, data.text_bytes())


def summary(plan: PlanEstimate, stage: Stage) -> str:
    """Return the size of the model, the grid of each stage and the planned memory of a device as text."""
    config, dtype = plan.config, stage.weights.context.compute_dtype
    if config.train.precision == "auto":
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        config = replace(config, train=replace(config.train, precision=precision))
    estimate = plan.with_config(config)
    lines = [
        f"{config.run.name}: {plan.description.size} in {str(dtype).removeprefix('torch.')} on "
        f"{stage.weights.device.type}, grid {' + '.join(str(s.sizes) for s in plan.stages)} (x, y, z, data)"
    ]
    tensors_gib = [peak - gib for peak, gib in zip(estimate.stage_gib, estimate.reserved_gib, strict=True)]
    for index, (state, peak) in enumerate(zip(estimate.states, tensors_gib, strict=True)):
        device = f"a device of stage {index}" if len(plan.stages) > 1 else "a device"
        parts = ", ".join(f"{kind} {nbytes / GIB:.3g}" for kind, nbytes in state.items())
        lines.append(f"planned memory of {device} in GiB: {parts}; {peak:.3g} at the peak of a step")
    if stage.weights.device.type != config.cluster.device:
        lines.append(
            f"cluster.device={config.cluster.device}: the ranks use {stage.weights.device.type}, so the precision, the "
            "memory and the cached weights of another device are planned; leave out cluster to plan for this machine"
        )
    return "\n".join(lines)


class StragglerDetector:
    """Detector of a rank that delays all ranks in several consecutive reports."""

    def __init__(self, hosts: list[str]):
        self.hosts = hosts
        self.slowest, self.times = -1, 0

    def note(self, busy: list[float]) -> tuple[dict, str]:
        """Record each rank's seconds of a step without waiting. Return their spread, and a message or ``""``."""
        median, worst = statistics.median(busy), max(busy)
        rank = busy.index(worst)
        late = worst > _LATE * median
        self.times = self.times + 1 if late and rank == self.slowest else int(late)
        self.slowest = rank
        message = ""
        if self.times and self.times % _LATE_TIMES == 0:
            message = f"rank {rank} on {self.hosts[rank]} takes {worst:.3f} s per step, the median is {median:.3f} s"
        return {"min": min(busy), "median": median, "max": worst, "slowest": rank}, message
