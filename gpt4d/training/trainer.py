"""The training loop, from initial weights to the last checkpoint."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from gpt4d.parallel.stage import Stage
from gpt4d.planner.stages import PlanEstimate
from gpt4d.runs.logger import RunFiles
from gpt4d.runtime import activity, gpu, signals
from gpt4d.runtime.activity import MAIN
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.runtime.hangs import HangDetector
from gpt4d.runtime.job import RAISED_ON_ALL_RANKS, Ranks
from gpt4d.runtime.signals import StopRequest
from gpt4d.step import TrainStep, build_stage, connect_stages
from gpt4d.task import registry as tasks
from gpt4d.training import measuring, preflight
from gpt4d.training.profiling import Profile

_SLOW_STEPS = 2  # lazy initialization slows the first steps of a job


class Trainer:
    """Trains on ``plan`` in the existing process group. All files of a run are in ``run.dir``.

    The watchdog of ``ranks`` ends the job if a collective takes longer than ``parallel.timeout_s``, from the first one
    to the end of the run. Raises ConfigError on every rank for mistakes that only the data or a checkpoint can show.
    """

    def __init__(self, plan: PlanEstimate, device: torch.device, ranks: Ranks | None = None):
        self.device, self.ranks = device, ranks
        stages = plan.stages if len(plan.stages) > 1 else ()
        places = {rank: f"stage {stage.index}" for stage in stages for rank in stage.ranks}
        hang_dir, timeout_s = Path(plan.config.run.dir) / "hang", plan.config.parallel.timeout_s
        self.hang_detector = HangDetector({}, timeout_s, hang_dir, places)
        if ranks:
            ranks.watchdog.hang_detector = self.hang_detector
        if plan.config.train.deterministic:
            torch.use_deterministic_algorithms(True)
            # By default torch also fills every temporary tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.task = task = tasks.get(registry.of(plan.config.model).task).create(plan.config)
        self.config = config = with_epochs(plan.config, task.samples)
        check_schedule(config)
        self.plan = plan = replace(plan, config=config)
        self.files = RunFiles(config, task.unit)
        run_on_rank0(self.files.enter, "locking run.dir")
        self.stage = self._connected_stage()
        task.connect(self.stage, plan.micro_batch_size(plan.stages[self.stage.index]))
        best = config.checkpoint.keep_best
        if best and not (best in task.validation and task.validation[best].steps):
            raise ConfigError(
                f"checkpoint.keep_best={best}: the data have no batch of this validation set; raise "
                "data.validation_fraction, or name a set of data.validation"
            )
        self.monitor = LossMonitor(config.train, config.optim.lr)
        self.checkpoints = RunCheckpoints(plan, self.stage, task, self.monitor, self.files)
        before_update, overlap = self.checkpoints.before_update, config.parallel.overlap.data
        is_spike, graphs = self.monitor.spikes if config.train.skip_spikes else None, config.train.cuda_graphs
        self.train_step = TrainStep(self.stage, task.compute, config.optim, overlap, before_update, is_spike, graphs)
        if ranks:
            ranks.finish_save, ranks.record_failure = self.checkpoints.finish, self.files.fail
            for link in self.stage.exchange.links.values() if self.stage.exchange else ():
                if link.worker is not None:
                    link.worker.on_error = ranks.fail
        common = plan, task, self.train_step, self.files
        self.validation = measuring.Validation(*common)
        self.evaluation = TrainingEvaluation(*common) if config.evaluate.every else None
        self.meter = measuring.StepMeter(plan, self.stage, task, self.hosts, self.files)
        self.progress = Progress()
        self.losses: dict[str, float] = {}  # of each validation set, if the last report has validated

    def _connected_stage(self) -> Stage:
        """Connect the ranks, compare them, and build this rank's stage."""
        plan, parallel, rank = self.plan, self.plan.config.parallel, torch.distributed.get_rank()
        own, timeout = plan.stage_of(rank), gpu.backend_timeout(parallel.timeout_s)
        with self._connecting("connecting the ranks of the grid's axes"):
            kind, context, expert_data = self.device.type, parallel.context, parallel.expert_data
            grid = Grid(own.sizes, kind, own.ranks, timeout, context, expert_data)
        self.hang_detector.axes = grid.active_axes
        probes = collectives.probes(grid.active_axes, self.device)
        self.hosts, self.slow = preflight.compare(plan.config, self.device, probes)
        stage = build_stage(plan, grid, self.device)
        if len(plan.stages) > 1:
            with self._connecting("connecting the pipeline's stages"):
                connect_stages(plan, stage, self.hosts.count(self.hosts[0]), timeout)
            self.hang_detector.axes = stage.axes
        self.hang_detector.name_layers(stage.module)
        return stage

    @contextmanager
    def _connecting(self, name: str) -> Iterator[None]:
        """Limit the time in which the body connects ranks. A rank that is ready early waits for the remaining ranks."""
        limit = self.ranks.watchdog.limit(name) if self.ranks else nullcontext()
        with MAIN.begin(name), activity.unlimited(), limit:
            yield

    def run(self, stop: StopRequest | None = None) -> None:
        """Train from the newest checkpoint, if present, to the end of ``train.steps``.

        A request to ``stop`` on any rank ends the run on all ranks once it is saved.
        """
        stop = stop or StopRequest()
        try:
            run_on_rank0(self._open_log, "opening the log")
            self.progress = self.checkpoints.resume(self.train_step)
            self.task.verify(self.files.run_dir)
            run_on_rank0(self._record_start, "recording this start")
            for message in self.slow:
                self.files.event("slow", f"SLOW: {message}", step=self.progress.step, what=message)
            profile = Profile(self.config, self.train_step, self.files, self.progress.step)
            with profile, stop.deferred():
                self._loop(profile, stop)
            self.finish()
            if self.stage.exchange:  # not after an error, which must not wait for transfers
                self.stage.exchange.close()
            run_on_rank0(self.files.close_log, "closing the log")
        except BaseException as error:
            # In a job of several ranks, report the error immediately and end the process. The error may result from an
            # error of another rank, so nothing here may wait before the report.
            if self.ranks and not isinstance(error, RAISED_ON_ALL_RANKS):
                raise
            if isinstance(error, Exception):
                self.files.fail(f"{type(error).__name__}: {error}")
            self._close()
            raise
        self._close()

    def _open_log(self) -> None:
        self.files.open_log()
        print(f"{measuring.summary(self.plan, self.stage)}\n{self.task.summary()}", flush=True)

    def _record_start(self) -> None:
        grids = [str(stage.sizes) for stage in self.plan.stages]
        changes, initial = self.checkpoints.changes, self.checkpoints.initial
        self.files.record_start(self._reached(), self.hosts, grids, self.task.identity(), changes, initial)

    def _close(self) -> None:
        self.train_step.release_graphs()  # before the end of the communicators that they use
        self.hang_detector.axes = {}  # drop unfinished collectives after an error; activities are watched to the end
        self.task.close()
        self.checkpoints.close()
        self.files.close()

    def _loop(self, profile: Profile, stop: StopRequest) -> None:
        progress, train = self.progress, self.config.train
        self.meter.restart(progress)
        self.hang_detector.begin_steps()
        unread: deque[PendingMetrics] = deque()
        first, stopping = progress.step, False
        while progress.step < train.steps and not stopping:
            step = progress.step + 1
            reporting = bool(self._due(step))
            # Timing of communication slows a GPU, so only the last step before a report is timed.
            self.meter.time_communication(reporting or profile.includes(step) or self.device.type == "cpu")
            with profile.step(step):
                unread.append(self.step(stop))
            self.checkpoints.report_saved()
            if step == first + _SLOW_STEPS:
                self.hang_detector.end_startup()
            # The GPU is one step ahead of the metrics that the host reads, unless the host needs them now.
            while len(unread) > (0 if reporting or stopping or train.skip_spikes else 1):
                stopping |= self.read(unread.popleft()).stopping
            for act in self._due(step, stopping):
                act()
        self.hang_detector.end_startup()
        self.checkpoints.report_saved(wait=True)
        if progress.step == train.steps and not self.monitor.is_finite:
            self.monitor.give_up()
        if stopping and progress.step < train.steps:
            reason = stop.signal or "another rank received a signal"
            message = f"{reason}: stopped after step {progress.step}; run the same command to resume"
            self.files.event("signal", message, **self._reached(), signal=stop.signal)
            self._plot()
            raise signals.Stopped

    def _due(self, step: int, stopping: bool = False) -> list[Callable[[], None]]:
        """Return the actions after ``step``, in their order. The first one is the report of the step."""
        config, last = self.config, step == self.config.train.steps

        def due(every: int) -> bool:
            return every > 0 and step % every == 0

        actions: list[Callable[[], None]] = []
        if last or due(config.train.validate_every):
            actions += [self._validate] if last else [self._validate, self._plot]  # the end of the run also plots
        if last or stopping or due(config.checkpoint.every):
            actions.append(self._save)
        if self.evaluation and (last or due(config.evaluate.every)):
            actions.append(partial(self.evaluation.report, self.progress))
        if actions or due(config.logging.every):
            actions = [self._report, *actions, partial(self.meter.restart, self.progress)]
        return actions

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
            self.files.event("skipped" if step_metrics.skipped else "spike", message, **values)
        return step_metrics

    def _report(self) -> None:
        assert self.monitor.last
        self.losses = {}
        self.files.step(self.meter.measure(self.monitor.last, self.progress))

    def _validate(self) -> None:
        self.losses = self.validation.report(self.progress)

    def _plot(self) -> None:
        run_on_rank0(self.files.plot, "plotting the losses")

    def _save(self) -> None:
        """Start to save, unless the last step was not finite: the update before may have spoiled the weights."""
        if self.monitor.is_finite:
            run_on_rank0(lambda: self.files.keep(self._reached()), "checking run.dir")
            self.checkpoints.save(self.train_step, self.progress, self.losses)

    def _reached(self) -> dict[str, int]:
        return self.progress.values(self.task.unit)

    def finish(self) -> None:
        """Report a sample, the final validation loss and the location of the outputs."""
        self.train_step.release_graphs()
        if sample := self.task.sample():
            self.files.event("sample", sample.message, **self._reached(), **sample.values)
        run_on_rank0(self._report_end, "reporting the end of the run")

    def _report_end(self) -> None:
        loss = self.losses.get(HELD_OUT)
        self.files.plot()
        validation, peak = f"validation loss {loss:.4f}, " if loss else "", gpu.peak_memory_gib(self.device)
        curve = self.files.curve
        message = f"done: {validation}{peak:.2f} GiB at peak, run {curve.parent}, loss curve {curve}"
        self.files.event("done", message, **self._reached(), validation_loss=loss)
