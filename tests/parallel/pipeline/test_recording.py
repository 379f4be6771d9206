"""A timeline of measured times: records of all stages, each with its own clock, reproduce the simulated step."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from gpt4d.parallel.pipeline import trace
from gpt4d.parallel.pipeline.simulation import Costs, Timeline, simulate
from gpt4d.parallel.pipeline.stage_program import StageTransfer, orders_of
from gpt4d.parallel.pipeline.trace import StageTrace, timeline
from tests.support.grids import metric_lines, train_in_rank

PIPELINE = "parallel.pipeline."


def recorded(step: Timeline, stage: int, clock: float) -> StageTrace:
    """Return a stage's record of a simulated step, on a clock that is ``clock`` seconds ahead."""
    count, recording = len(step.stages), StageTrace()
    for action, start, stop in step.stages[stage]:
        recording.actions.append((action, start, stop))
    for action, source, target, _, stop in step.transfers:
        if stage in (source % count, target % count) and source % count != target % count:
            # The sender starts a transfer when its tensor exists, and a receiver long before it arrives.
            started = next(span.stop for span in step.stages[source % count] if span.action == action)
            recording.transfers.append(
                (StageTransfer(action, target), started if source % count == stage else 0.0, stop)
            )
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
    crossing = [span for span in step.transfers if span.source % 3 != span.target % 3]
    assert {span[:3]: span[3:] for span in joined.transfers} == {span[:3]: pytest.approx(span[3:]) for span in crossing}


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
    settings = (PIPELINE + "stages=2", PIPELINE + "microbatches=4", PIPELINE + "schedule=eager_1f1b_w", "train.steps=3")
    grids = PIPELINE + "stage_grids=[1x1x1x1,2x1x1x1]"
    plain, config = tiny(*settings, grids, f"run.dir={tmp_path / 'plain'}"), tiny(*settings, grids, "profile.steps=2-3")
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
    assert [line["loss"] for line in metric_lines(config.run.dir)] == [
        line["loss"] for line in metric_lines(plain.run.dir)
    ]
    files = {path.name for path in Path(config.run.dir).rglob("traces/*/*")}
    assert files == {*(f"rank_0000{rank}.json.gz" for rank in range(3)), "timeline.png", "pipeline.png"}
