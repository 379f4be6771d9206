"""The training loop, from initial weights to the last checkpoint."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gpt4d.checkpoint.checkpoint_dir import Progress
from gpt4d.checkpoint.run import RunCheckpoints
from gpt4d.config import HELD_OUT, ConfigError, batch_size_at, with_epochs
from gpt4d.evaluation.during_training import TrainingEvaluation
from gpt4d.model import registry
from gpt4d.optim.monitor import LossMonitor, PendingMetrics, StepMetrics
from gpt4d.optim.schedule import check_schedule, learning_rate
from gpt4d.parallel.comm import collectives
from gpt4d.parallel.grid import Grid
from gpt4d.plan import ParallelPlan
from gpt4d.runs import logger, starts
from gpt4d.runs.history import History
from gpt4d.runs.lock import DirectoryLock
from gpt4d.runs.plots import plot_losses
from gpt4d.runtime import activity, gpu, signals
from gpt4d.runtime.activity import MAIN
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.runtime.hangs import HangDetector
from gpt4d.runtime.job import RAISED_ON_ALL_RANKS
from gpt4d.runtime.signals import StopRequest
from gpt4d.runtime.watchdog import Watchdog
from gpt4d.runtime.writing import optional_file, required_file, warn
from gpt4d.step import TrainStep, build_stage, connect_stages
from gpt4d.task import registry as tasks
from gpt4d.task.task import ValidationSet
from gpt4d.training import measuring, preflight
from gpt4d.training.profiling import Profile

_SLOW_STEPS = 2  # lazy initialization slows the first steps of a job


class Trainer:
    """Trains on ``plan`` in the existing process group. All files of a run are in ``run.dir``.

    ``watchdog`` ends the job if a collective takes longer than ``parallel.timeout_s``, from the first one to the end of
    the run. Raises ConfigError on every rank for mistakes that only the data or a checkpoint can show.
    """

    def __init__(self, plan: ParallelPlan, device: torch.device, watchdog: Watchdog | None = None):
        self.device, self.watchdog = device, watchdog
        config, self.run_dir = plan.config, Path(plan.config.run.dir)
        timeout_s = config.parallel.timeout_s
        self.hang_detector = HangDetector({}, timeout_s, self.run_dir / "hang")
        if watchdog:
            watchdog.hang_detector = self.hang_detector
        self.lock: DirectoryLock | None = None  # only on rank 0
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
            # By default torch also fills every temporary tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        task_name = registry.of(config.model).task
        self.task = tasks.get(task_name).create(config)
        config = with_epochs(config, self.task.samples)
        check_schedule(config)
        self.plan = plan = replace(plan, config=config)
        self.config = config
        run_on_rank0(self._enter_run_dir, "locking run.dir")
        rank = torch.distributed.get_rank()
        stage_plan = plan.stage_of(rank)
        with self._connecting("connecting the ranks of the grid's axes"):
            timeout = gpu.backend_timeout(timeout_s)
            context, expert_data = config.parallel.context, config.parallel.expert_data
            grid = Grid(stage_plan.sizes, device.type, stage_plan.ranks, timeout, context, expert_data)
        self.hang_detector.axes = grid.active_axes
        self.hosts, self.slow = preflight.compare(config, device, collectives.probes(grid.active_axes, device))
        self.stage = build_stage(plan, grid, device)
        if len(plan.stages) > 1:
            with self._connecting("connecting the pipeline's stages"):
                connect_stages(plan, self.stage, self.hosts.count(self.hosts[0]), gpu.backend_timeout(timeout_s))
            self.hang_detector.axes = self.stage.axes
            self.hang_detector.places = {rank: f"stage {stage.index}" for stage in plan.stages for rank in stage.ranks}
        self.hang_detector.name_layers(self.stage.module)
        self.task.connect(self.stage, plan.micro_batch_size(stage_plan))
        best = config.checkpoint.keep_best
        if best and not (best in self.task.validation and self.task.validation[best].steps):
            raise ConfigError(
                f"checkpoint.keep_best={best}: the data have no batch of this validation set; raise "
                "data.validation_fraction, or name a set of data.validation"
            )
        self.monitor = LossMonitor(config.train, config.optim.lr)
        self.checkpoints = RunCheckpoints(plan, self.stage, self.task, task_name, self.monitor)
        self.train_step = TrainStep(
            self.stage,
            self.task.compute,
            config.optim,
            config.parallel.overlap.data,
            self.checkpoints.before_update,
            is_spike=self.monitor.spikes if config.train.skip_spikes else None,
            cuda_graphs=config.train.cuda_graphs,
        )
        if watchdog:
            watchdog.finish_save = self.checkpoints.finish
            for link in self.stage.exchange.links.values() if self.stage.exchange else ():
                if link.worker is not None:
                    link.worker.on_error = watchdog.end_job
        self.evaluation: TrainingEvaluation | None = None
        if config.evaluate.every:
            self.evaluation = TrainingEvaluation(plan, self.stage, self.task, self.train_step.release_graphs)
        self.meter = measuring.StepMeter(plan, self.stage, self.task, self.hosts)
        self.progress = Progress()
        self.validation_loss: float | None = None
        self.started_at: float | None = None  # time of this start in starts.jsonl; only on rank 0
        self.log: logger.RunLogger | logger.NullLogger = logger.NullLogger()
        self.history: History | None = None  # only on rank 0

    @contextmanager
    def _connecting(self, name: str) -> Iterator[None]:
        """Limit the time in which the body connects ranks. A rank that is ready early waits for the remaining ranks."""
        with MAIN.begin(name), activity.unlimited(), self.watchdog.limit(name) if self.watchdog else nullcontext():
            yield

    def run(self, stop: StopRequest | None = None) -> None:
        """Train from the newest checkpoint, if present, to the end of ``train.steps``.

        A request to ``stop`` on any rank ends the run on all ranks once it is saved.
        """
        stop = stop or StopRequest()
        try:
            run_on_rank0(self._open_log, "opening the log")
            self.progress = self.checkpoints.resume(self.train_step, self.log)
            self.task.verify(self.run_dir)
            run_on_rank0(self._record_start, "recording this start")
            for message in self.slow:
                self.log.event("slow", f"SLOW: {message}", step=self.progress.step, what=message)
            profile = Profile(self.config, self.train_step, self.log, self.progress.step)
            with profile, stop.deferred():
                self._loop(profile, stop)
            self.finish()
            if self.stage.exchange:  # not after an error, which must not wait for transfers
                self.stage.exchange.close()
            run_on_rank0(self.log.close, "closing the log")
        except BaseException as error:
            # In a job of several ranks, report the error immediately and end the process. The error may result from an
            # error of another rank, so nothing here may wait before the report.
            if self.watchdog and not isinstance(error, RAISED_ON_ALL_RANKS):
                raise
            if self.started_at and isinstance(error, Exception):
                self._record_failure(f"{type(error).__name__}: {error}")
            self._close()
            raise
        self._close()

    def _close(self) -> None:
        self.train_step.release_graphs()  # before the end of the communicators that they use
        self.hang_detector.axes = {}  # drop unfinished collectives after an error; activities are watched to the end
        self.task.close()
        self.checkpoints.close()
        self.log.close(briefly=True)
        if self.lock:
            self.lock.close()

    def _loop(self, profile: Profile, stop: StopRequest) -> None:
        config, progress, train = self.config, self.progress, self.config.train
        self.meter.restart(progress)
        self.hang_detector.begin_steps()
        unread: deque[PendingMetrics] = deque()
        first, stopping = progress.step, False
        while progress.step < train.steps and not stopping:
            step = progress.step + 1
            last = step == train.steps
            validating = last or _due(step, train.validate_every)
            saving = last or _due(step, config.checkpoint.every)
            evaluating = self.evaluation and (last or _due(step, config.evaluate.every))
            reporting = validating or evaluating or saving or _due(step, config.logging.every)
            # Timing of communication slows a GPU, so only the last step before a report is timed.
            self.meter.time_communication(reporting or profile.includes(step) or self.device.type == "cpu")
            with profile.step(step):
                unread.append(self.step(stop))
            self.checkpoints.report_saved()
            if step == first + _SLOW_STEPS:
                self.hang_detector.end_startup()
            # The GPU is one step ahead of the metrics that the host reads, unless the host needs them now.
            while len(unread) > (0 if reporting or stopping or train.skip_spikes else 1):
                step_metrics = self.read(unread.popleft())
                stopping |= step_metrics.stopping
            if reporting or stopping:
                self.log.step(self.meter.measure(step_metrics, progress, self.log))
                losses = self._validate() if validating else {}
                if validating and not last:  # the end of the run plots the losses of the last step
                    run_on_rank0(self._plot_losses, "plotting the losses")
                if (saving or stopping) and self.monitor.is_finite:
                    run_on_rank0(self._keep_run_dir, "checking run.dir")
                    self.checkpoints.save(self.train_step, progress, losses)
                if self.evaluation and evaluating:
                    self.checkpoints.before_update()  # the averaged weights replace the weights, which a save may copy
                    self.evaluation.report(self.log, progress)
                self.meter.restart(progress)
        self.hang_detector.end_startup()
        self.checkpoints.report_saved(wait=True)
        if progress.step == train.steps and not self.monitor.is_finite:
            self.monitor.give_up()
        if stopping and progress.step < train.steps:
            reason = stop.signal or "another rank received a signal"
            message = f"{reason}: stopped after step {progress.step}; run the same command to resume"
            self.log.event("signal", message, **progress.values(self.task.unit), signal=stop.signal)
            run_on_rank0(self._plot_losses, "plotting the losses")
            raise signals.Stopped

    def step(self, stop: StopRequest) -> PendingMetrics:
        """Train on the next batch; the update is skipped if loss or gradient norm are not finite."""
        train, progress = self.config.train, self.progress
        lr = learning_rate(progress.step, self.config.optim, train.steps)
        batch_size = batch_size_at(train, progress.samples)
        microbatches = self.plan.microbatches_of(batch_size)
        batches = self.task.batches(progress.samples)
        counts, stopping = self.task.counts(progress.samples), stop.signal is not None
        result = self.train_step(batches, microbatches, counts.trained, lr, stopping, counts.unpadded)
        progress.step += 1
        progress.samples += batch_size
        progress.units += batch_size * self.task.units_per_sample
        self.task.after_update(progress.step)
        values = torch.stack((result.loss, result.norm, result.skipped.double(), result.stopping))
        return PendingMetrics(progress.step, lr, values, result.routing)

    def read(self, pending: PendingMetrics) -> StepMetrics:
        step_metrics = pending.read()
        self.progress.skipped += step_metrics.skipped
        if event := self.monitor.note(step_metrics):
            message, values = event
            self.log.event("skipped" if step_metrics.skipped else "spike", message, **values)
        return step_metrics

    def _validate(self) -> dict[str, float]:
        """Report the losses of the validation sets, and return the mean loss per counted unit of each set.

        With ``optim.validate_averages``, also report the losses of the averaged weights.
        """
        sets = {name: data for name, data in self.task.validation.items() if data.steps}
        results = {name: self.evaluate(data) for name, data in sets.items()}
        if not results:
            return {}
        losses = {name: result["loss"] for name, result in results.items()}
        if self.config.optim.validate_averages:
            with self.task.averaged():
                for name, data in sets.items():
                    results[name]["average_loss"] = self.evaluate(data)["loss"]
        held_out: Mapping[str, float | None] = results.pop(HELD_OUT, {"loss": None})
        self.validation_loss = held_out["loss"]
        shown = [f"{name} {loss:.4f}".removeprefix(f"{HELD_OUT} ") for name, loss in losses.items()]
        if "average_loss" in held_out:
            shown[0] += f", of averaged weights {held_out['average_loss']:.4f}"
        message = f"step {self.progress.step}/{self.config.train.steps}  validation loss {', '.join(shown)}"
        values: Mapping[str, Any] = {**held_out, "sets": results} if results else held_out
        self.log.event("validation", message, **self.progress.values(self.task.unit), **values)
        return losses

    def evaluate(self, data: ValidationSet) -> dict[str, float]:
        """Return the loss per counted unit of a validation set; for text also its perplexity and bits per byte."""
        batches = chain.from_iterable(map(data.batches, range(data.steps)))
        total = self.train_step.evaluate(batches, data.steps * self.plan.microbatches).item()
        return logger.of_loss(total, data.units, data.text_bytes())

    def _enter_run_dir(self) -> None:
        """Create the run directory and lock it until the end of the run."""
        with required_file(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock = DirectoryLock(self.run_dir)

    def _keep_run_dir(self) -> None:
        """Create the run directory again if somebody has removed it, so that the run can be saved.

        Raises ConfigError if another run's directory is at its path.
        """
        assert self.lock
        if self.lock.is_valid():
            return
        self.lock.close()
        self._enter_run_dir()
        found = starts.read(self.run_dir)
        if found and found[-1].get("time") != self.started_at:
            raise ConfigError(
                f"run.dir={self.run_dir}: replaced during the run by the directory of another run; move that one "
                f"elsewhere. This run is not saved after step {self.progress.step}"
            )
        if not found:
            self.log.reopen()
            self.history = None
            message = f"warning: {self.run_dir} was removed during the run; it is created again"
            self.log.event("removed", message, step=self.progress.step)
            self._record_start()

    def _open_log(self) -> None:
        self.log = logger.RunLogger(self.config, self.run_dir, self.task.unit)
        print(f"{measuring.summary(self.plan, self.stage)}\n{self.task.summary()}", flush=True)

    def _record_start(self) -> None:
        grids = [str(stage.sizes) for stage in self.plan.stages]
        identity, changes = self.task.identity(), self.checkpoints.changes
        step, initial = self.progress.step, self.checkpoints.initial
        self.started_at = starts.record(self.config, step, self.hosts, grids, identity, changes, initial)
        self.log.start(**self.progress.values(self.task.unit))
        if self.watchdog:
            self.watchdog.record_failure = self._record_failure

    def _record_failure(self, problem: str) -> None:
        """Write that the job ends with an error, plot the losses and close the log. Rank 0's threads may call it."""
        self.log.failed(problem)
        self._plot_losses()
        self.log.close(briefly=True)  # a tracker may lose values that it has not written when the process ends

    def finish(self) -> None:
        """Report a sample, the final validation loss and the location of the outputs."""
        self.train_step.release_graphs()
        if sample := self.task.sample():
            self.log.event("sample", sample.message, **self.progress.values(self.task.unit), **sample.values)
        run_on_rank0(self._report_end, "reporting the end of the run")

    def _report_end(self) -> None:
        validation = f"validation loss {self.validation_loss:.4f}, " if self.validation_loss else ""
        self._plot_losses()
        peak = gpu.peak_memory_gib(self.device)
        message = f"done: {validation}{peak:.2f} GiB at peak, run {self.run_dir}, loss curve {self._curve}"
        self.log.event("done", message, **self.progress.values(self.task.unit), validation_loss=self.validation_loss)

    @property
    def _curve(self) -> Path:
        return self.run_dir / "loss.png"

    def _plot_losses(self) -> None:
        """Plot the losses of the run on rank 0. An error is a warning, because a run must not end for its plot."""
        partial = self._curve.with_name("loss.partial.png")  # the end of a failed job may cut off the plot
        try:
            with optional_file(self._curve):
                partial.unlink(missing_ok=True)  # a FIFO of this name blocks
                # The history reads only new lines, so the time for a plot does not grow with the run.
                self.history = self.history or History(self.run_dir)
                self.history.update()
                plot_losses({self.run_dir.name: self.history}, partial, "tokens", "hours", title=self.run_dir.name)
                partial.replace(self._curve)
        except Exception as error:
            warn(f"{self._curve}: {type(error).__name__}: {error}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
