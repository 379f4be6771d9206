"""Training of a stage on a simulated GPU as the trainer does it: batches, steps, averages, checkpoints, a sample."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from gpt4d.checkpoint import checkpoint_dir, saving, storage
from gpt4d.config import Config
from gpt4d.data.sampler import Blend
from gpt4d.model import registry
from gpt4d.optim.monitor import PendingMetrics
from gpt4d.parallel.layers import experts
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.step import TrainStep
from gpt4d.task import diffusion, generation, language
from gpt4d.task.diffusion import Diffusion
from gpt4d.task.reading import ReadingTask
from gpt4d.validation import validate
from tests.simulated_gpu import waits
from tests.simulated_gpu.job import GPU, Job, simulated_job
from tests.support.stages import connected_stage

STEPS = 2


class _Samples:
    """Random samples in host memory."""

    count = 256

    def __init__(self, row_shape: tuple[int, ...], bound: int, dtype: type):
        self.row_shape, self.bound, self.dtype = row_shape, bound, dtype

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        draw = np.random.default_rng(int(sample_ids[0]))
        return draw.integers(0, self.bound, (len(sample_ids), *self.row_shape), dtype=self.dtype)


class RandomText(language.LanguageModeling):
    """Language modeling on random tokens. Token 0 ends a document."""

    def __init__(self, config: Config):
        self._files = SimpleNamespace(end_of_text=0, masked=False)
        samples = _Samples((config.train.seq_len + 1,), 20, np.uint16)
        training = Blend([samples] * 2, [[*config.data.blend.values()]]) if config.data.blend else samples
        ReadingTask.__init__(self, config, training, samples)

    def sample(self):
        tokenizer = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=[1, 2, 3]), decode=str)
        with self._averages.applied():
            return generation.continuations(self._stage, tokenizer, 1, ["", ""], 2, self._documents)


class RandomImages(Diffusion):
    """Diffusion on random images."""

    def __init__(self, config: Config):
        self.settings = model = config.model
        samples = _Samples((model.image_size, model.image_size, model.image_channels), 256, np.uint8)
        ReadingTask.__init__(self, config, samples, samples)

    def sample(self):
        with self._averages.applied():
            return diffusion.generated_images(self._stage, count=2, steps=1)


class Outcome(NamedTuple):
    """The results of a job's rank."""

    problems: list[str]
    overlaps: dict[str, int]  # as Job.overlaps
    launched: int  # number of launched graphs
    peak: int  # maximum memory in bytes


def train(config: Config, world_size: int, rank: int, steps: int = STEPS, cuda_graphs: bool = False) -> Outcome:
    """Train some steps as a rank of a job, evaluate, save, and draw a sample."""
    plan = validate(config, world_size)
    with simulated_job(world_size, rank, waits.STEP, waits.FIRST) as job, TemporaryDirectory() as directory:
        stage = connected_stage(plan, torch.float32, ranks_per_host=4, device=GPU)
        job.compute_dtype = stage.weights.context.compute_dtype
        is_text = registry.of(config.model).task == "language_modeling"
        task = (RandomText if is_text else RandomImages)(plan.config)
        task.connect(stage, plan.micro_batch_size(plan.stage_of(rank)))
        with (
            patch.object(saving, "run_on_rank0", lambda work, name: work()),
            patch.object(saving, "run_on_all_ranks", lambda work, *_: work()),
            patch.object(saving, "gather_in_group", lambda *_, **__: []),  # so that no rank completes the checkpoint
            patch.object(experts, "rows_per_rank", _equal_rows(experts.rows_per_rank)),
        ):
            _train(job, plan, stage, task, Path(directory), steps, cuda_graphs)
        stage.wait_for_copies()
        if stage.exchange:
            stage.exchange.close()
        task.close()
    return Outcome(list(job.problems), dict(job.overlaps), job.graphs.launches, job.memory.peak)


def _equal_rows(read: Callable) -> Callable:
    """Return a function that reads the numbers of rows of experts, and returns equal numbers for all ranks."""

    def rows(sent, received, ranks: int):
        read(sent, received, ranks)
        shares = experts.equal_shares(len(sent.order), ranks)
        return shares, shares

    return rows


def _train(
    job: Job, plan: ParallelPlan, stage: Stage, task: ReadingTask, directory: Path, steps: int, cuda_graphs: bool
) -> None:
    config = plan.config
    saver = saving.Saver(config.checkpoint, directory, stage.grid)
    overlap = config.parallel.overlap.data
    train_step = TrainStep(
        *(stage, task.compute, config.optim, overlap), before_update=saver.before_change, cuda_graphs=cuda_graphs
    )
    units, unread = config.train.batch_size * task.units_per_sample, []
    for step in range(1, steps + 1):
        job.problems.steady = step > 1
        if step == steps:
            train_step.evaluate(task.validation["held_out"].batches(0), plan.microbatches)
        result = train_step(task.batches(step * config.train.batch_size), plan.microbatches, units, lr=0.1)
        task.after_update(step)
        values = torch.stack((result.loss, result.norm, result.skipped.double(), result.stopping))
        unread.append(PendingMetrics(step, 0.1, values, result.routing))
        if len(unread) > 1:
            unread.pop(0).read()
        saver.finished(wait=True)
        train_step.reducer.wait_params()
        shards = storage.parts(stage.module, train_step.optimizer, task.extra_state(), stage.copies)
        saver.start(checkpoint_dir.Meta(checkpoint_dir.Progress(step), config.model, [], "", {}, {}, {}), shards, {})
    saver.finished(wait=True)
    saver.close()
    job.problems.host_waits = waits.STEP | waits.BETWEEN_STEPS
    train_step.release_graphs()
    task.sample()
