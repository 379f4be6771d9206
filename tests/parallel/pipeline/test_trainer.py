"""A run over stages: losses of the serial run, validation, a sample, checkpoints that any pipeline continues."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpt4d.planner.stages import PipelineEstimate
from gpt4d.trainer import Trainer
from gpt4d.validation import validate
from tests.support.grids import bytes_sent, full, metric_lines

PIPELINE = "parallel.pipeline."
COMMON = (
    "logging.sample_prompt=The",
    "logging.sample_tokens=8",
    "model.layers=4",
    "train.steps=6",
    "train.batch_size=8",
    "train.validate_every=3",
    "checkpoint.every=3",
)


def run_in_rank(config):
    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    if not any(part.begins or part.ends for part in trainer.stage.parts.values()):
        for loader in (trainer.task._loader, trainer.task.validation["held_out"].loader):
            loader.source.rows = None  # a stage in the middle reads no tokens
    trainer.run()


def values(config):
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    validations = [line["loss"] for line in lines if line.get("event") == "validation"]
    (sample,) = [line["text"] for line in lines if line.get("event") == "sample"]
    return [line["loss"] for line in metric_lines(config.run.dir)], validations, sample


@pytest.fixture(scope="module")
def made():
    return []


@pytest.fixture
def serial(ranks, tiny, made, tmp_path):
    """Return the report of the serial run, which runs once."""
    if not made:
        config = tiny(*COMMON, f"run.dir={tmp_path}/serial")
        ranks.run(1, run_in_rank, config)
        made.append(values(config))
    return made[0]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (6, (PIPELINE + "stages=2", PIPELINE + "stage_grids=[2x1x1x2,1x1x2x1]", "optim.shard_states=true")),
        (3, (PIPELINE + "stages=2", PIPELINE + "stage_grids=[1x1x2x1,1x1x1x1]")),
        (
            4,
            (
                PIPELINE + "stages=2",
                PIPELINE + "schedule=interleaved_1f1b",
                PIPELINE + "chunks_per_stage=2",
                "parallel.gx=2",
                "parallel.sequence_parallel=true",
            ),
        ),
        full(2, (PIPELINE + "stages=2",)),
        full(4, (PIPELINE + "stages=4", PIPELINE + "schedule=1f1b", "train.activation_checkpointing=full")),
    ],
    ids=str,
)
def test_a_run_over_stages_equals_the_serial_run(ranks, tiny, serial, world_size, settings):
    config = tiny(*COMMON, *settings)
    ranks.run(world_size, run_in_rank, config)
    losses, validations, sample = values(config)
    assert losses == pytest.approx(serial[0], rel=1e-5) and validations == pytest.approx(serial[1], rel=1e-5)
    assert sample == serial[2]
    planned = PipelineEstimate.of(validate(config, world_size)).plan().comm["world"]["bytes"]
    assert bytes_sent(config.run.dir)["world"] == pytest.approx(planned, rel=1e-9)


def test_a_run_continues_over_other_stages_and_grids(ranks, tiny, serial):
    parts = [
        (2, 6, (PIPELINE + "stages=2", PIPELINE + "stage_grids=[2x1x1x2,1x1x2x1]")),
        (4, 2, ("parallel.gy=2",)),
        (6, 4, (PIPELINE + "stages=4", "optim.shard_states=true")),
    ]
    for steps, world_size, settings in parts:
        config = tiny(*COMMON, f"train.steps={steps}", "checkpoint.every=2", "train.validate_every=0", *settings)
        ranks.run(world_size, run_in_rank, config)
    lines = metric_lines(config.run.dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(serial[0], rel=1e-5)
