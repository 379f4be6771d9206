"""Complete runs on a simulated GPU: the trainer's threads, checkpoints, averages, validation and samples."""

import io
import threading
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from gpt4d.config import Config, GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.runtime import watchdog
from gpt4d.runtime.hangs import HangDetector
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.simulated_gpu import waits
from tests.simulated_gpu.job import GPU, simulated_job
from tests.support.grids import metric_lines
from tests.support.settings import configured

RUN = [
    "train.precision=bf16", "train.steps=4", "train.validate_every=2", "train.validation_batches=1",
    "checkpoint.every=1", "optim.ema_decay=0.9",
]  # fmt: skip


def train(config: Config) -> list[str]:
    allowed = waits.STEP | waits.BETWEEN_STEPS | (set() if config.checkpoint.async_save else waits.SYNCHRONOUS_SAVE)
    with redirect_stdout(io.StringIO()), simulated_job(1, 0, allowed, waits.FIRST) as job:
        Trainer(validate(config, 1), GPU).run()
    return list(job.problems)


def check(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


def test_a_run_on_a_gpu_that_saves_in_the_background_and_resumes_has_no_race(simulate, tiny):
    text = [*RUN, "model.layers=1", "data.reset_attention=true", "logging.sample_tokens=2", "logging.every=2"]
    check(simulate(train, tiny(*text, "train.steps=3", "optim.schedule_steps=4")))
    config = tiny(*text, "checkpoint.async_save=false", "optim.schedule_steps=4")
    check(simulate(train, config))
    assert [line["step"] for line in metric_lines(config.run.dir)] == [1, 2, 3, 4]


@pytest.mark.full
def test_a_run_of_a_unet_on_a_gpu_has_no_race(simulate, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(24):
        Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(photos / f"{number}.png")
    config = configured(
        [
            "model=unet_tiny", "model.image_size=8", "model.channels=16", "model.multipliers=[1,2]",
            "model.blocks_per_level=1", "model.attention_at=[4]", "model.head_size=8", "model.groups=4",
            "data=pictures", f"data.path={photos}", "data.validation_fraction=0.4", f"data.cache_dir={tmp_path}/cache",
            "logging.sample_images=4", "logging.sample_steps=2", "train.batch_size=8", f"run.dir={tmp_path}/run",
            *RUN, "train.steps=2",
        ]
    )  # fmt: skip
    check(simulate(train, config))


def watch() -> list[str]:
    """Start a collective, and let the watchdog ask the GPU whether it has ended."""
    failures, asked = [], threading.Event()
    watching = watchdog.Watchdog(dist.HashStore(), 0, 1, "nid1", failures.append)
    with simulated_job(2, 0, watchdog=watching) as job, patch.object(watchdog, "HEARTBEAT_S", 0.0):
        grid = Grid(GridSizes(2), GPU.type)
        grid.x.start_all_reduce(torch.ones(2, device=GPU))
        watching.hang_detector = HangDetector(grid.active_axes, 120.0, Path("hang"))
        overdue = watching.hang_detector.overdue

        def note(since: float):
            result = overdue(since)
            asked.set()
            return result

        with patch.object(watching.hang_detector, "overdue", note):
            watching.start()
            assert asked.wait(60)
            watching.stop()
    return [*failures, *job.problems]


def test_the_watchdog_asks_the_gpu_of_its_rank_for_unfinished_collectives(simulate):
    check(simulate(watch))
