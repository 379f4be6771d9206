"""The checkpoints of a running job: which one to resume from, when a save has ended, what is reported about both."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.checkpoint.checkpoint_dir import Meta, Progress
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.checkpoint.saving import Saver
from gpt4d.config import ConfigError
from gpt4d.monitor import LossMonitor, all_finite
from gpt4d.parallel.plan import ParallelPlan
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import all_ranks_true, run_on_all_ranks, run_on_rank0
from gpt4d.step import TrainStep
from gpt4d.task.task import Task


class EventLog(Protocol):
    """Where events are reported (gpt4d.metrics.RunLogger)."""

    def event(self, event: str, message: str, /, **values) -> None: ...


class RunCheckpoints:
    """Resumes a run from its checkpoints and saves new ones. All ranks call the same methods in the same order.

    Args:
        plan: the grids to record; its configuration says where and how often to save.
        stage: the model on this rank.
        task: identity of the data, and further state.
        task_name: its name in the registry.
        monitor: its statistics are saved and restored.
    """

    def __init__(self, plan: ParallelPlan, stage: Stage, task: Task, task_name: str, monitor: LossMonitor):
        self.plan, self.stage, self.task, self.task_name, self.monitor = plan, stage, task, task_name, monitor
        self.run_dir = Path(plan.config.run.dir)
        self.log: EventLog
        self._saver = Saver(plan.config.checkpoint, self.run_dir, stage.grid)
        self.before_update = self._saver.before_change
        self.close = self._saver.close

    def resume(self, step: TrainStep, log: EventLog) -> Progress:
        """Load the newest intact checkpoint that ``checkpoint.resume`` selects, and return its progress."""
        self.log, config = log, self.plan.config
        run_on_rank0(lambda: checkpoint_dir.remove_leftovers(self.run_dir))
        resume = config.checkpoint.resume
        damaged: list[Path] = []
        progress = Progress()
        for checkpoint in run_on_rank0(lambda: checkpoint_dir.resume_candidates(resume, self.run_dir)):
            try:
                progress = self._load(checkpoint, self.stage.module, step.optimizer)
                break
            except Damaged as damage:
                if resume != "auto":
                    raise
                damaged.append(checkpoint)
                log.event("damaged", f"DAMAGED: {damage}", path=str(checkpoint), problem=str(damage))
        else:
            if damaged:
                raise ConfigError(
                    f"run.dir={self.run_dir}: all {len(damaged)} checkpoint(s) are damaged; restore an intact "
                    "checkpoint or set another run.name"
                )
        for checkpoint in damaged:
            aside = run_on_rank0(partial(checkpoint_dir.quarantine, checkpoint))
            log.event("damaged", f"renamed to {aside} until the next checkpoint is saved", path=str(aside))
        if progress.step >= config.train.steps:
            message = f"{self.run_dir} is complete; raise train.steps or set another run.name"
            log.event("complete", message, **progress.values(self.task.unit))
        return progress

    def _load(self, checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        run_on_all_ranks(lambda: checkpoint_dir.check_fits(checkpoint, self.plan.config.model))
        run_on_all_ranks(lambda: checkpoint_dir.check_task(checkpoint, self.task_name, self.task.identity()))
        progress = sharded.load(checkpoint, module, optimizer, self.stage.grid, self.task.extra_state())
        self.monitor.restore(Meta.read(checkpoint).monitor)
        self.log.event("resume", f"resuming from {checkpoint}", **progress.values(self.task.unit), path=str(checkpoint))
        return progress

    def save(self, step: TrainStep, progress: Progress) -> None:
        """Start to save. Raises ConfigError if a weight or an optimizer state is not finite."""
        self.report_saved(wait=True)
        step.reducer.wait_params()
        shards = sharded.parts(self.stage.module, step.optimizer, self.task.extra_state(), self.stage.copies)
        if not all_ranks_true(all_finite([shard.local for shard in shards.values()])):
            raise ConfigError(
                f"optim.lr={self.plan.config.optim.lr}: after step {progress.step} weights or optimizer states are not "
                "finite; try a lower rate (not checkpointed)"
            )
        grids = [stage.sizes._asdict() for stage in self.plan.stages]
        model, identity = self.plan.config.model, self.task.identity()
        meta = Meta(replace(progress), model, grids, self.task_name, identity, self.monitor.state())
        self._saver.start(meta, shards, self.task.documents())

    def report_saved(self, wait: bool = False) -> None:
        """Report a save that has ended. Raises ConfigError if it has failed."""
        saved = self._saver.finished(wait)
        if saved:
            message = f"saved {saved.path} in {saved.seconds:.2f} s, training was blocked for {saved.blocked_s:.2f} s"
            times = {"seconds": saved.seconds, "blocked_s": saved.blocked_s}
            values = saved.progress.values(self.task.unit)
            self.log.event("checkpoint", message, **values, path=str(saved.path), **times)
