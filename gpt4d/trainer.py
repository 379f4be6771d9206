"""The training loop, from the first weights to the last checkpoint."""

import math
import os
import socket
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import torch
from omegaconf import OmegaConf

from gpt4d import metrics, optim
from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.checkpoint.saving import Saver
from gpt4d.config import Config, ConfigError, GridSizes
from gpt4d.data.loader import Loader
from gpt4d.data.prepare import corpus
from gpt4d.data.sampler import Blend, Sequences
from gpt4d.generate import continuation
from gpt4d.model.gpt import GPT
from gpt4d.model.init import initialize
from gpt4d.monitor import LossMonitor, PendingMetrics, StepMetrics, StragglerDetector, all_finite
from gpt4d.parallel import collectives, gradients
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream, compute_dtype
from gpt4d.planner import workload
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.profiling import Profile
from gpt4d.runtime import preflight, signals
from gpt4d.runtime.consensus import all_gather_object, all_ranks_true, run_on_all_ranks, run_on_rank0
from gpt4d.runtime.signals import StopRequest
from gpt4d.runtime.watchdog import HangDetector, Watchdog

_FIRST_STEPS = 2  # of a job: what is made at its first use takes longer than it will


class Trainer:
    """Trains ``config`` on a grid of ``sizes`` in the process group that exists. What outlives it is in ``run.dir``.

    ConfigError, alike on every rank, for mistakes that only the data or a checkpoint can show.
    """

    def __init__(self, config: Config, sizes: GridSizes, device: torch.device):
        self.config, self.device = config, device
        self.run_dir = Path(config.run.dir)
        self.progress = checkpoint_dir.Progress()
        self.validation_loss: float | None = None
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

        run_on_rank0(self._make_run_dir)
        self.corpus = run_on_rank0(lambda: corpus(config.data))
        self.files = self.corpus.first
        training, validation = run_on_all_ranks(self._read_corpus)
        for files, sequences in zip(self.corpus.files, training, strict=True):
            if not sequences.count:
                raise ConfigError(
                    f"train.seq_len={config.train.seq_len}: a sequence takes {config.train.seq_len + 1} tokens and the "
                    f"text to train on in {files.directory} has {len(sequences.tokens)}; use more text or shorter ones"
                )

        self.grid = Grid(sizes, device.type)
        hosts, self.slow = preflight.compare(config, device, collectives.probes(self.grid, device))
        self.stragglers = StragglerDetector(hosts)
        dtype = compute_dtype(config.train.precision, device)
        weights = WeightStream(self.grid, dtype, device=device, overlap=config.parallel.overlap)
        cache_layers = config.parallel.cache_layers
        self.model = GPT(
            config.model,
            weights,
            recompute=config.train.activation_checkpointing == "full",
            cache_layers=config.model.layers if cache_layers == "all" else cache_layers,
            document_end=self.files.end_of_text if config.data.reset_attention else None,
        )
        initialize(self.model, config.train.seed, self.grid)
        self.training = self._loader(training, config.data.workers)
        self.validation = self._loader(validation, workers=0) if all(s.count for s in validation) else None
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        self.gradient_sum = gradients.GradientReducer(
            weights, parameters, config.parallel.overlap.data, shard=config.optim.shard_states
        )
        self.owned = self.gradient_sum.owned
        self.optimizer = optim.build_optimizer(zip(names, self.owned, strict=True), config.optim)
        state = workload.training_state(config.model, sizes, config.optim.shard_states)
        self.state_gib = {kind: nbytes / GIB for kind, nbytes in state.items()}
        self.health = LossMonitor(config.train, config.optim.lr)
        self.saver = Saver(config.checkpoint, self.run_dir, self.grid)

    def run(self, stop: StopRequest | None = None, watch: Watchdog | None = None) -> None:
        """Goes on from the newest checkpoint, if it may, to ``train.steps``.

        Stopped, on all ranks alike, when any of them was asked to ``stop`` and what there was is saved. While steps go
        on, ``watch`` ends the job if a collective takes longer than ``parallel.timeout_s``.
        """
        self.stop, self.watch = stop or StopRequest(), watch
        self.report: metrics.RunLogger | metrics.NullLogger = metrics.NullLogger()
        try:
            run_on_rank0(self._start_report)
            self._resume()
            for words in self.slow:
                self.report.event("slow", f"SLOW: {words}", step=self.progress.step, what=words)
            tracing = Profile(self.config, self.model, self.optimizer, self.report, self.progress.step)
            with tracing as profile, self.stop.deferred():
                self._loop(profile)
            self._finish()
        finally:
            self.training.close()
            self.saver.close()
            self.report.close()

    def _loop(self, profile: Profile) -> None:
        config = self.config
        self._restart_clock()
        unread: deque[PendingMetrics] = deque()
        step, stopping = self.progress.step, False
        settled = step + _FIRST_STEPS
        while step < config.train.steps and not stopping:
            with profile.step(step + 1):
                unread.append(self._step())
            self._report_saved()
            step = self.progress.step
            if self.watch and step == settled:
                self.watch.hang_detector = HangDetector(
                    self.grid.active_axes, self.model, config.parallel.timeout_s, self.run_dir / "hang"
                )
            validating = step == config.train.steps or _due(step, config.train.validate_every)
            saving = step == config.train.steps or _due(step, config.checkpoint.every)
            reporting = validating or saving or _due(step, config.logging.every)
            # A GPU works a step ahead of what is read of it, unless it is waited for anyway.
            while len(unread) > (0 if reporting or stopping or config.train.skip_spikes else 1):
                numbers = self._read(unread.popleft())
                stopping |= numbers.stopping
            if reporting or stopping:
                self.report.step(self._measured(numbers))
                if validating:
                    self._validate()
                if (saving or stopping) and self.health.is_finite:
                    self._save()
                self._restart_clock()
        if self.watch:
            self.watch.hang_detector = None
        self._report_saved(wait=True)
        if step == config.train.steps and not self.health.is_finite:
            self.health.give_up()
        if stopping and step < config.train.steps:
            words = (
                f"{self.stop.signal or 'another rank was asked'}: stopped after step {step}; the same command goes on"
            )
            self.report.event("signal", words, **asdict(self.progress), signal=self.stop.signal)
            raise signals.Stopped

    def _read(self, numbers: PendingMetrics) -> StepMetrics:
        numbers = numbers.read()
        self.progress.skipped += numbers.skipped
        if told := self.health.note(numbers):
            words, values = told
            self.report.event("skipped" if numbers.skipped else "spike", words, **values)
        return numbers

    def _step(self) -> PendingMetrics:
        """One update, unless its numbers are not finite."""
        config, grid, progress = self.config, self.grid, self.progress
        lr = optim.learning_rate(progress.step, config.optim, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        tokens = config.train.batch_size * config.train.seq_len
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.train()
        for ids, targets, numbers in self.training.step(progress.samples):
            # A sum over all tokens of the step divided by their count: how they are dealt out makes no difference.
            part = self.model.loss_sum(ids, targets, numbers) / tokens
            part.backward()
            loss += part.detach()
        self.gradient_sum.finish()
        squared_norm = gradients.squared_norm(self.owned, grid, self.device)
        stopping = torch.tensor(float(self.stop.signal is not None), dtype=torch.float64, device=self.device)
        totals = collectives.all_reduce(torch.stack((self._once(loss), squared_norm, stopping)), grid.world)
        loss, norm, stopping = totals[0], totals[1].sqrt(), totals[2]
        skipped = ~(loss.isfinite() & norm.isfinite())
        if config.train.skip_spikes and self.health.spikes(loss.item(), norm.item()):
            skipped = torch.ones_like(skipped)
        optim.clip(self.owned, norm, config.optim.clip_norm)
        self.saver.before_change()
        optim.update(self.optimizer, skipped)
        self.gradient_sum.spread()
        self.optimizer.zero_grad(set_to_none=True)

        progress.step += 1
        progress.samples += config.train.batch_size
        progress.tokens += tokens
        return PendingMetrics(progress.step, lr, torch.stack((loss, norm, skipped.double(), stopping)))

    def _read_corpus(self) -> tuple[list[Sequences], list[Sequences]]:
        try:
            self.tokenizer = (self.files.directory / checkpoint_dir.TOKENIZER).read_bytes()
            self.fingerprint = self.files.fingerprint()
            return self._sequences("train", self.config.data.shuffle), self._sequences("validation", shuffle=False)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror} on {socket.gethostname()}; all nodes must share its file system"
            ) from None

    def _sequences(self, split: str, shuffle: bool) -> list[Sequences]:
        length, seed = self.config.train.seq_len, self.config.train.seed
        return [Sequences(files.tokens(split), length, seed, shuffle) for files in self.corpus.files]

    def _loader(self, sequences: list[Sequences], workers: int) -> Loader:
        train, grid = self.config.train, self.grid
        source = sequences[0] if len(sequences) == 1 else Blend(sequences, self.corpus.weights)
        place = (grid.batch_shard, grid.sizes.batch_shards)
        return Loader(source, train.batch_size, *place, train.micro_batch_size, self.device, workers)

    def _count(self, split: str) -> int:
        return sum(files.count(split, "tokens") for files in self.corpus.files)

    def _once(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss as summed over the world: ranks along x and y have the same samples, and one of them counts."""
        return loss if self.grid.x.index == self.grid.y.index == 0 else torch.zeros_like(loss)

    def _validate(self) -> None:
        """Reports the mean loss a token of the first ``validation_batches`` batches of the held-out text."""
        config, batches = self.config.train, self._validation_batches()
        if not batches:
            return
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for batch in range(batches):
                for microbatch in self.validation.step(batch * config.batch_size):
                    loss += self.model.loss_sum(*microbatch)
        loss = collectives.all_reduce(self._once(loss), self.grid.world).item()
        self.validation_loss = loss = loss / (batches * config.batch_size * config.seq_len)
        text = f"step {self.progress.step}/{config.steps}  validation loss {loss:.4f}"
        self.report.event("validation", text, **asdict(self.progress), loss=loss)

    def _validation_batches(self) -> int:
        if self.validation is None:
            return 0
        whole = self.validation.sequences.count // self.config.train.batch_size
        return min(self.config.train.validation_batches, whole)

    def _resume(self) -> None:
        """Goes on from the newest checkpoint that is as it was written."""
        run_on_rank0(lambda: checkpoint_dir.remove_leftovers(self.run_dir))
        resume = self.config.checkpoint.resume
        checkpoints = run_on_rank0(lambda: checkpoint_dir.resume_candidates(resume, self.run_dir))
        damaged = []
        for checkpoint in checkpoints:
            try:
                self._load(checkpoint)
                break
            except Damaged as damage:
                if resume != "auto":
                    raise
                damaged.append(checkpoint)
                self.report.event("damaged", f"DAMAGED: {damage}", path=str(checkpoint), problem=str(damage))
        else:
            if damaged:
                raise ConfigError(
                    f"{self.run_dir}: each of its {len(damaged)} checkpoint(s) is damaged; put one back that is whole, "
                    "or begin anew with another run.name"
                )
        for checkpoint in damaged:
            aside = run_on_rank0(lambda checkpoint=checkpoint: checkpoint_dir.quarantine(checkpoint))
            self.report.event("damaged", f"it is {aside} until the next is saved", path=str(aside))
        if self.progress.step >= self.config.train.steps:
            words = f"{self.run_dir} is complete: raise train.steps, or begin another with run.name=…"
            self.report.event("complete", words, **asdict(self.progress))

    def _load(self, checkpoint: Path) -> None:
        run_on_all_ranks(lambda: checkpoint_dir.check_fits(checkpoint, self.config.model))
        meta = checkpoint_dir.Meta.read(checkpoint)
        if meta.tokenizer != self.fingerprint:
            raise ConfigError(
                f"data={self.config.data.name}: {checkpoint} was trained with another tokenizer, its tokens mean "
                "something else; give the corpus it had, or another run.name"
            )
        self.progress = sharded.load(checkpoint, self.model, self.optimizer, self.grid)
        self.health.restore(meta.bounds)
        self.report.event("resume", f"going on from {checkpoint}", **asdict(self.progress), path=str(checkpoint))

    def _save(self) -> None:
        self._report_saved(wait=True)
        self.gradient_sum.arrive()
        parts = sharded.parts(self.model, self.optimizer)
        if not all_ranks_true(all_finite([part.local for part in parts.values()])):
            raise ConfigError(
                f"optim.lr={self.config.optim.lr}: after step {self.progress.step} weights or states are not finite, "
                "and are not saved; a lower rate may do"
            )
        sizes, data = self.grid.sizes._asdict(), self.config.data.name
        meta = checkpoint_dir.Meta(
            replace(self.progress), self.config.model, sizes, data, self.fingerprint, self.health.state()
        )
        self.saver.start(meta, parts, self.tokenizer)

    def _report_saved(self, wait: bool = False) -> None:
        """Reports a save that has ended. ConfigError if it has failed."""
        saved = self.saver.finished(wait)
        if saved:
            words = f"saved {saved.path} in {saved.seconds:.2f} s, training stood still for {saved.blocked_s:.2f}"
            times = {"seconds": saved.seconds, "blocked_s": saved.blocked_s}
            self.report.event("checkpoint", words, **asdict(saved.progress), path=str(saved.path), **times)

    def _make_run_dir(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.config.run.dir}: {error.strerror}; choose a directory to write to"
            ) from None

    def _start_report(self) -> None:
        config = self.config
        self.report = metrics.RunLogger(config, self.run_dir)
        OmegaConf.save(OmegaConf.structured(config), self.run_dir / "config.yaml")
        size = sum(math.prod(p.spec.shape) for p in self.model.parameters())
        compute = str(self.model.weights.compute_dtype).removeprefix("torch.")
        parts = ", ".join(f"{kind} {size:.3g}" for kind, size in self.state_gib.items())
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.model.weights.compute_dtype]
        estimate = Estimate(replace(config, train=replace(config.train, precision=precision)), self.grid.sizes)
        peak = estimate.memory_gib(config.train.micro_batch_size or estimate.share) - config.cluster.reserved_gib
        print(
            f"{config.run.name}: {size / 1e6:,.1f} M parameters in {compute} on {self.device.type}, "
            f"grid {self.grid.sizes} (x, y, z, data)\n"
            f"memory of a device as planned, in GiB: {parts}; {peak:.3g} at the peak of a step\n"
            f"{config.data.name}: {self._count('train'):,} tokens to train on, "
            f"{self._count('validation'):,} held out",
            flush=True,
        )
        if config.train.validation_batches and not self._validation_batches():
            print("no validation: the held-out text is shorter than one batch", flush=True)

    def _finish(self) -> None:
        """Says how it went: a sample, the loss curve, where everything is."""
        config, run_dir = self.config, self.run_dir
        if config.logging.sample_prompt and config.logging.sample_tokens:
            text = continuation(
                self.model, self.files.tokenizer(), config.logging.sample_prompt, config.logging.sample_tokens
            )
            self.report.event("sample", f"\n{text}\n", **asdict(self.progress), text=text)
        if not self.grid.world.index:
            validation = f"validation loss {self.validation_loss:.4f}, " if self.validation_loss else ""
            curve = metrics.plot_losses(run_dir)
            peak = metrics.peak_memory_gib(self.device)
            self.report.line.print(f"done: {validation}{peak:.2f} GiB at peak, run {run_dir}, loss curve {curve}")

    def _restart_clock(self) -> None:
        self.clock, self.clock_step = time.perf_counter(), self.progress.step
        self.training.waited_s = 0.0
        for axis in self.grid:
            axis.traffic.read()

    def _measured(self, numbers: StepMetrics) -> dict:
        """The line of metrics.jsonl for the steps since the clock was started: times and bytes are those of a step."""
        config, world = self.config, self.grid.sizes.devices
        steps = self.progress.step - self.clock_step
        seconds = (time.perf_counter() - self.clock) / steps
        flops = workload.model_flops(config.model, config.train.batch_size, config.train.seq_len) / seconds / world
        peak = metrics.peak_flops(self.device)
        used = {axis.name: axis.traffic.read() for axis in self.grid if axis.size > 1}
        waited = sum(total["exposed_s"] for total in used.values()) / steps
        busy, late = self.stragglers.note(all_gather_object(seconds - waited))
        if late:
            self.report.event(
                "straggler",
                f"LATE: {late}",
                step=self.progress.step,
                host=self.stragglers.hosts[busy["slowest"]],
                **busy,
            )
        return {
            "step": self.progress.step,
            "loss": numbers.loss,
            "grad_norm": numbers.norm,
            "lr": numbers.lr,
            "skipped": self.progress.skipped,
            "tokens": self.progress.tokens,
            "epoch": self.progress.samples / self.training.sequences.count,
            "step_time_s": seconds,
            "busy_s": busy,
            "data_wait_s": self.training.waited_s / steps,
            "tokens_per_s": config.train.batch_size * config.train.seq_len / seconds,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "memory_gib": metrics.peak_memory_gib(self.device),
            "memory": {"after_step": metrics.used_memory_gib(self.device), **self.state_gib},
            "comm": {axis: {k: v / steps for k, v in total.items()} for axis, total in used.items()},
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
