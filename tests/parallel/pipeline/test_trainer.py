"""A run over stages: losses of the serial run, validation, a sample, checkpoints, and a timeline of measured times."""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from gpt4d.parallel.pipeline import trace
from gpt4d.parallel.pipeline.simulation import Costs, StageTransfer, Timeline, orders_of, simulate
from gpt4d.parallel.pipeline.trace import StageTrace, timeline
from gpt4d.validation import validate
from tests.support.faults import losses
from tests.support.grids import bytes_sent, full, metric_lines, train_in_rank
from tests.support.run_files import events
from tests.support.training import build_trainer, serial_fixture

PIPELINE = "parallel.pipeline."
TWO, SHARDED = PIPELINE + "stages=2", "optim.shard_states=true"
INTERLEAVED = (PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2")
COMMON = (
    "logging.sample_prompt=The", "logging.sample_tokens=8", "model.layers=4", "train.steps=6", "train.batch_size=8",
    "train.validate_every=3", "checkpoint.every=3",
)  # fmt: skip


def run_in_rank(config):
    trainer = build_trainer(config)
    source = trainer.task.validation["held_out"].source
    reads_tokens = any(part.begins or part.ends for part in trainer.stage.parts.values())  # not in the middle
    with nullcontext() if reads_tokens else patch.object(type(source), "rows", None):
        trainer.run()


def values(config):
    """Return the losses of a run, its validation losses and its sample."""
    (sample,) = events(config.run.dir, "sample")
    validations = [line["loss"] for line in events(config.run.dir, "validation")]
    return [line["loss"] for line in metric_lines(config.run.dir)], validations, sample["text"]


serial = serial_fixture(COMMON, run_in_rank, values)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        full(3, (TWO, PIPELINE + "stage_grids=[1x1x2x1,1x1x1x1]", SHARDED)),
        (3, (TWO, PIPELINE + "stage_grids=[2x1x1x1,1x1x1x1]", *INTERLEAVED, "parallel.sequence_parallel=true")),
        full(6, (TWO, PIPELINE + "stage_grids=[2x1x1x2,1x1x2x1]", SHARDED)),
        full(4, (TWO, *INTERLEAVED, "parallel.gx=2", "parallel.sequence_parallel=true")),
        full(2, (TWO,)),
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
    planned = validate(config, world_size).slowest.comm["world"]["bytes"]
    assert bytes_sent(config.run.dir)["world"] == pytest.approx(planned, rel=1e-9)


def test_a_run_continues_over_other_stages_and_grids(ranks, tiny, serial):
    parts = [
        (2, 3, (TWO, PIPELINE + "stage_grids=[2x1x1x1,1x1x1x1]")),
        (4, 2, ("parallel.gy=2",)),
        (6, 4, (PIPELINE + "stages=3", PIPELINE + "stage_grids=[1x1x2x1,1x1x1x1,1x1x1x1]", SHARDED)),
    ]
    for steps, world_size, settings in parts:
        config = tiny(*COMMON, f"train.steps={steps}", "checkpoint.every=2", "train.validate_every=0", *settings)
        ranks.run(world_size, run_in_rank, config)
    lines = metric_lines(config.run.dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(serial[0], rel=1e-5)


def recorded(step: Timeline, stage: int, clock: float) -> StageTrace:
    """Return a stage's record of a simulated step, on a clock that is ``clock`` seconds ahead."""
    count, recording = len(step.stages), StageTrace()
    recording.actions += [(action, start, stop) for action, start, stop in step.stages[stage]]
    for action, source, target, _, stop in step.transfers:
        if stage in (source % count, target % count) and source % count != target % count:
            # The sender starts a transfer when its tensor exists, and a receiver long before it arrives.
            started = next(span.stop for span in step.stages[source % count] if span.action == action)
            start = started if source % count == stage else 0.0
            recording.transfers.append((StageTransfer(action, target), start, stop))
    return StageTrace.from_json(json.loads(json.dumps(recording.since(-clock).to_json())))


@pytest.mark.parametrize(
    ("schedule", "chunks", "transfer"), [("eager_1f1b", 1, 0.5), ("interleaved_1f1b", 2, 0.1), ("zb_h1", 1, 3.0)]
)
def test_the_timeline_of_stages_with_different_clocks_is_that_of_the_step(schedule, chunks, transfer):
    costs = Costs.equal(3 * chunks, 1.0, 1.25, 0.75, transfer)
    step = simulate(orders_of(schedule, 3, 6, costs, chunks), costs)
    joined = timeline([recorded(step, stage, clock) for stage, clock in enumerate((7.0, -2.5, 40.0))])
    for spans, expected in zip(joined.stages, step.stages, strict=True):
        assert [span.action for span in spans] == [span.action for span in expected]
        assert [span[1:] for span in spans] == [pytest.approx(span[1:]) for span in expected]
    crossing = {span[:3]: span[3:] for span in step.transfers if span.source % 3 != span.target % 3}
    assert {span[:3]: span[3:] for span in joined.transfers} == {key: pytest.approx(crossing[key]) for key in crossing}


def train_and_record_pipeline(config):
    """Train, and return the timelines drawn on this rank, with their titles and the names of the files."""
    drawn = []

    def record(joined, title, path):
        drawn.append((joined, title, path.name))
        path.touch()

    with patch.object(trace, "draw", record):
        train_in_rank(config)
    return drawn


def test_a_profile_over_stages_shows_every_action_and_transfer_of_one_step(ranks, tiny, tmp_path):
    pipeline = {"stages": 2, "microbatches": 4, "schedule": "eager_1f1b_w", "stage_grids": "[1x1x1x1,2x1x1x1]"}
    settings = [f"parallel.pipeline.{key}={value}" for key, value in pipeline.items()] + ["train.steps=3"]
    plain, config = tiny(*settings, f"run.dir={tmp_path / 'plain'}"), tiny(*settings, "profile.steps=2-3")
    ranks.run(3, train_in_rank, plain)
    ((drawn,), *others) = ranks.run(3, train_and_record_pipeline, config)
    assert others == [[], []]
    step, title, name = drawn
    assert "step 3, eager_1f1b_w" in title and "pipeline.png" in name
    for stage, spans in enumerate(step.stages):
        expected = {(kind, microbatch, stage) for kind in "FIW" for microbatch in range(4)}
        assert sorted(span.action for span in spans) == sorted(expected)
        times = [time for span in spans for time in span[1:]]
        assert times == sorted(times) and times[0] >= 0
    crossing = [(*span.action, span.source, span.target) for span in step.transfers]
    expected = [("F", m, 0, 0, 1) for m in range(4)] + [("I", m, 1, 1, 0) for m in range(4)]
    assert sorted(crossing) == sorted(expected)
    computed = {span.action: span for spans in step.stages for span in spans}
    for action, _, target, start, stop in step.transfers:
        assert start >= computed[action].stop and start <= stop
        assert stop <= computed[action._replace(virtual_stage=target)].start
    assert losses(config) == losses(plain)
    files = {path.name for path in Path(config.run.dir).rglob("traces/*/*")}
    assert files == {*(f"rank_0000{rank}.json.gz" for rank in range(3)), "timeline.png", "pipeline.png"}
