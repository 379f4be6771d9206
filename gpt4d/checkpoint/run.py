"""The checkpoints of a running job: selection of the checkpoint to resume from, saves, and events about both."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt4d.checkpoint import checkpoint_dir, lifecycle, storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint, Meta, Progress
from gpt4d.checkpoint.saving import Saver
from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import Change, ConfigError, length_key, recorded_settings
from gpt4d.data import tokenizers
from gpt4d.model import registry
from gpt4d.optim.monitor import LossMonitor, all_finite
from gpt4d.optim.optimizer import Optimizer
from gpt4d.optim.schedule import learning_rate
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.runs import starts
from gpt4d.runs.logger import RunFiles
from gpt4d.runtime import gpu
from gpt4d.runtime.consensus import all_ranks_true, run_on_all_ranks, run_on_rank0
from gpt4d.step import TrainStep
from gpt4d.task.task import Task


class RunCheckpoints:
    """Resumes a run from its checkpoints and saves new ones. All ranks call the same methods in the same order.

    Args:
        plan: the grids to record; its configuration says where and how often to save.
        stage: the model on this rank.
        task: identity of the data, and additional state.
        monitor: the loss monitor, whose statistics are saved and restored.
        log: the log.
    """

    def __init__(self, plan: ParallelPlan, stage: Stage, task: Task, monitor: LossMonitor, log: RunFiles):
        self.plan, self.stage, self.task, self.monitor, self.log = plan, stage, task, monitor, log
        self.task_name = registry.of(plan.config.model).task
        self.run_dir = Path(plan.config.run.dir)
        self.changes: Mapping[str, Change] = {}  # settings that differ from the checkpoint's settings
        self.initial: Path | None = None  # the checkpoint whose weights the run has started from
        self._inherited: dict[str, bytes] = {}  # files of the loaded checkpoint that an export needs
        timeout = gpu.backend_timeout(plan.config.parallel.timeout_s)
        self._saver = Saver(plan.config.checkpoint, self.run_dir, stage.grid, timeout)
        self.before_update = self._saver.before_change
        self.close, self.finish = self._saver.close, self._saver.finish

    def resume(self, step: TrainStep) -> Progress:
        """Load the newest intact checkpoint that ``checkpoint.resume`` selects, and return its progress.

        A run without checkpoints loads the weights of ``checkpoint.init``, if that is set.

        Raises ConfigError on all ranks if the run was trained with other settings or other data.
        """
        log, config = self.log, self.plan.config
        run_on_rank0(lambda: lifecycle.remove_leftovers(self.run_dir), "removing unfinished checkpoints")
        damaged: list[Path] = []
        progress = Progress()
        # Another job may have saved here since ``check_run``, which runs before run.dir is locked.
        for path in map(Path, run_on_rank0(self._candidates, "looking for checkpoints")):
            try:
                progress = self._load(Checkpoint(path), step.optimizer)
                break
            except Damaged as damage:
                if config.checkpoint.resume != "auto":
                    raise
                damaged.append(path)
                log.event("damaged", f"DAMAGED: {damage}", path=str(path), problem=str(damage))
        else:
            if damaged:
                raise ConfigError(
                    f"run.dir={self.run_dir}: all {len(damaged)} checkpoint(s) are damaged; restore an intact "
                    "checkpoint or set another run.name"
                )
            changes = run_on_rank0(lambda: starts.check_last(config), "comparing the settings with the last start")
            self.changes = {key: Change(*change) for key, change in changes.items()}
            self._initialize()
        best = config.checkpoint.keep_best
        # Results are sent to all ranks as text.
        run_on_rank0(lambda: str(lifecycle.mark_best(self.run_dir, best)), "marking the best checkpoint")
        for path in damaged:
            aside = run_on_rank0(partial(_quarantine, path), f"renaming {path.name}")
            log.event("damaged", f"renamed to {aside} until the next checkpoint is saved", path=aside)
        if progress.step >= config.train.steps:
            message = f"{self.run_dir} is complete; raise {length_key(config.train)} or set another run.name"
            log.event("complete", message, **progress.values(self.task.unit))
        return progress

    def _candidates(self) -> list[str]:
        selected = checkpoint_dir.resume_candidates(self.plan.config.checkpoint.resume, self.run_dir)
        return [str(checkpoint.path) for checkpoint in selected]

    def _load(self, checkpoint: Checkpoint, optimizer: Optimizer) -> Progress:
        config = self.plan.config
        name = f"reading the settings of {checkpoint.path.name}"
        self.changes = run_on_all_ranks(lambda: checkpoint.check_settings(config), name)
        identity, allowed = self.task.identity(), config.checkpoint.allow_changes
        run_on_all_ranks(lambda: checkpoint.check_task(self.task_name, identity, allowed), name)
        storage.load(checkpoint, self.stage.module, optimizer, self.stage.grid, self.task.extra_state())
        meta, path = checkpoint.meta, checkpoint.path
        progress = replace(meta.progress)  # The trainer advances it.
        same_samples = meta.identity.get("samples") == identity.get("samples")
        self.task.seek(progress.samples, meta.position if same_samples else {})
        if not meta.grids:  # an imported model, which has no state of a task
            self.task.after_init()
        self.monitor.restore(meta.monitor)
        self._inherit(checkpoint)
        self.log.event("resume", f"resuming from {path}", **progress.values(self.task.unit), path=str(path))
        self._report_changes(progress)
        return progress

    def _initialize(self) -> None:
        """Load the weights of ``checkpoint.init``, or its averaged weights if it has any."""
        config, module, grid = self.plan.config, self.stage.module, self.stage.grid
        checkpoint = run_on_all_ranks(lambda: checkpoint_dir.initial(config), "looking for checkpoint.init")
        if checkpoint is None:
            return
        identity, remedy = self.task.identity(), checkpoint_dir.OTHER_INIT
        run_on_all_ranks(
            lambda: checkpoint.check_task(self.task_name, identity, ("data",), remedy),
            f"reading the settings of {checkpoint.path.name}",
        )
        storage.load(checkpoint, module, None, grid)
        averaged = storage.load_averages(checkpoint, module, grid)
        self.task.after_init()
        self._inherit(checkpoint)
        self.initial = checkpoint.path
        message = f"starting from the {'averaged ' if averaged else ''}weights of {checkpoint.path}"
        self.log.event("init", message, path=str(checkpoint.path), averaged=averaged)
        # Only positions differ, as ``check_fits`` requires.
        changed = registry.of(config.model).changed_structure(checkpoint.meta.model, config.model)
        for name, (before, after) in changed.items():
            message = f"model.{name}={after}: {before} in the training of the initial weights"
            self.log.event("change", message, step=0, key=f"model.{name}", before=before, after=after)

    def _inherit(self, checkpoint: Checkpoint) -> None:
        inherits = checkpoint_dir.MODEL_FILES
        self._inherited = checkpoint.documents(
            name for name in checkpoint.manifest if name in inherits or tokenizers.is_companion(name)
        )

    def _report_changes(self, progress: Progress) -> None:
        """Report changed settings and, if the length of the run has changed, the effect on the learning rate."""
        config, step = self.plan.config, progress.step
        for key, (before, after) in self.changes.items():
            message, values = f"{key}={after}: {before} until step {step}", {}
            if key == "train.steps" and not config.optim.schedule_steps:
                rates = [learning_rate(step, config.optim, steps) for steps in (before, after)]
                if rates[0] != rates[1]:
                    values = {"next_lr": rates}
                    message += (
                        f"; the schedule now ends at step {after}, so the next learning rate is {rates[1]:.3g} instead "
                        f"of {rates[0]:.3g}"
                    )
                    if config.optim.decay_from is None:
                        message += (
                            f" (to keep the old schedule, add optim.schedule_steps={before} and "
                            "checkpoint.allow_changes=[optim.schedule_steps])"
                        )
            self.log.event("change", message, step=step, key=key, before=before, after=after, **values)

    def save(self, step: TrainStep, progress: Progress, validation: Mapping[str, float]) -> None:
        """Start to save. Raises ConfigError if a weight or an optimizer state is not finite.

        ``validation``: the loss of each validation set at this step; empty without a validation at this step.
        """
        self.report_saved(wait=True)
        step.reducer.wait_params()
        shards = storage.parts(self.stage.module, step.optimizer, self.task.extra_state(), self.stage.copies)
        finite = all_finite([shard.local for shard in shards.values()])
        if not all_ranks_true(finite, f"checking the weights of step {progress.step}"):
            raise ConfigError(
                f"optim.lr={self.plan.config.optim.lr}: after step {progress.step} weights or optimizer states are not "
                "finite; try a lower rate (not checkpointed)"
            )
        grids = [stage.sizes._asdict() for stage in self.plan.stages]
        model, identity = self.plan.config.model, self.task.identity()
        settings = recorded_settings(asdict(self.plan.config))
        losses = {name: loss for name, loss in validation.items() if math.isfinite(loss)}
        name = f"locating sample {progress.samples}"
        position = run_on_rank0(lambda: self.task.position(progress.samples), name)
        state = self.monitor.state()
        meta = Meta(replace(progress), model, grids, self.task_name, identity, state, settings, losses, position)
        self._saver.start(meta, shards, {**self._inherited, **self.task.documents()})

    def report_saved(self, wait: bool = False) -> None:
        """Report a save that has ended. Raises ConfigError if it has failed."""
        saved = self._saver.finished(wait)
        if saved:
            message = f"saved {saved.path} in {saved.seconds:.2f} s, training was blocked for {saved.blocked_s:.2f} s"
            times = {"seconds": saved.seconds, "blocked_s": saved.blocked_s}
            values: dict[str, Any] = saved.progress.values(self.task.unit)
            if saved.best:
                message += f"; the best for {self.plan.config.checkpoint.keep_best} is {saved.best.name}"
                values["best"] = str(saved.best)
            self.log.event("checkpoint", message, **values, path=str(saved.path), **times)


def _quarantine(directory: Path) -> str:
    return str(lifecycle.quarantine(directory))
