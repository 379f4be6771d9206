"""Training of a stage on a simulated GPU as the trainer does it: loader, steps, averages, metrics, evaluation."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from gpt4d.config import Config
from gpt4d.model import registry
from gpt4d.monitor import PendingMetrics
from gpt4d.parallel.grid import Grid
from gpt4d.step import TrainStep, build_stage, connect_stages
from gpt4d.task.diffusion import Diffusion
from gpt4d.task.language import LanguageModeling
from gpt4d.task.reading import ReadingTask
from gpt4d.validation import validate
from tests.simulated_gpu.job import GPU, simulated_job

SAMPLES = 1024
# The functions in which the host may wait for the GPU in every step, and those with a cache or before the first step.
HOST_WAITS = {("gpt4d/monitor.py", "PendingMetrics.read")}  # reads the metrics of the previous step
FIRST_WAITS = {
    ("gpt4d/parallel/comm/stats.py", "seconds_between"),  # of the first collective of a link
    ("gpt4d/parallel/layers/group_norm_kernels.py", "_index"),
    ("gpt4d/parallel/layers/heads_kernels.py", "_constant"),
    ("gpt4d/parallel/random.py", "_intervals"),
    ("gpt4d/task/diffusion_process.py", "DiffusionProcess.__init__.<locals>.<genexpr>"),
}


class _Samples:
    """Random samples in host memory."""

    count = SAMPLES

    def __init__(self, row_shape: tuple[int, ...], bound: int, dtype: type):
        self.row_shape, self.bound, self.dtype = row_shape, bound, dtype

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        draw = np.random.default_rng(int(sample_ids[0]))
        return draw.integers(0, self.bound, (len(sample_ids), *self.row_shape), dtype=self.dtype)


class RandomText(LanguageModeling):
    """Language modeling on random tokens. Token 0 ends a document."""

    def __init__(self, config: Config):
        self._files = SimpleNamespace(end_of_text=0)
        samples = _Samples((config.train.seq_len + 1,), 20, np.uint16)
        ReadingTask.__init__(self, config, samples, samples)


class RandomImages(Diffusion):
    """Diffusion on random images."""

    def __init__(self, config: Config):
        self.settings = model = config.model
        samples = _Samples((model.image_size, model.image_size, model.image_channels), 256, np.uint8)
        ReadingTask.__init__(self, config, samples, samples)


class Outcome(NamedTuple):
    """The problems of a job, and its collectives by name."""

    problems: list[str]
    collectives: dict[str, int]


def train(config: Config, world_size: int, rank: int, steps: int = 2) -> Outcome:
    """Train some steps as a rank of a job, and evaluate before the last one."""
    plan = validate(config, world_size)
    config = plan.config
    with simulated_job(world_size, rank, HOST_WAITS, FIRST_WAITS) as job:
        stage_plan = plan.stage_of(rank)
        grid = Grid(stage_plan.sizes, GPU.type, stage_plan.ranks)
        stage = build_stage(config, grid, GPU, plan=plan)
        job.compute_dtype = stage.weights.context.compute_dtype
        if len(plan.stages) > 1:
            connect_stages(plan, stage, ranks_per_host=4)
        task = (RandomText if registry.of(config.model).task == "language_modeling" else RandomImages)(config)
        task.connect(stage, plan.micro_batch_size(stage_plan))
        train_step = TrainStep(stage, task.compute, config.optim, config.parallel.overlap.data)
        units = config.train.batch_size * task.units_per_sample
        unread = None
        for step in range(1, steps + 1):
            job.problems.steady = step > 1
            if step == steps:
                train_step.evaluate(task.validation_batches(0), plan.microbatches)
            result = train_step(task.batches(step * config.train.batch_size), plan.microbatches, units, lr=0.1)
            task.after_update(step)
            values = torch.stack((result.loss, result.norm, result.skipped.double(), result.stopping))
            if unread is not None:
                unread.read()
            unread = PendingMetrics(step, 0.1, values)
        train_step.reducer.wait_params()
        if stage.exchange:
            stage.wait_for_copies()
            stage.exchange.close()
        task.close()
    return Outcome(list(job.problems), dict(job.collectives))
