"""parallel.pipeline resolves to stages with their own grids and parts of the model, or to one line that helps."""

import pytest

from gpt4d.config import ConfigError, GridSizes
from gpt4d.validation import validate
from tests.support.settings import configured

MODEL = ("model=gpt_tiny", "model.hidden=32", "data.path=null", "train.batch_size=16")


def plan(world_size, *settings):
    return validate(configured([*MODEL, *settings]), world_size)


def test_two_stages_share_the_devices_and_the_work():
    """The head is as much work as two of these narrow blocks."""
    found = plan(8, "parallel.pipeline.stages=2", "parallel.gx=2", "parallel.gy=2")
    assert [stage.sizes for stage in found.stages] == [GridSizes(2, 2, 1, 1)] * 2
    assert [stage.ranks for stage in found.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [stage.parts for stage in found.stages] == [((0, 4),), ((4, 6),)]
    assert found.microbatches == 8 and found.micro_batch_size(found.stages[0]) == 2


def test_stages_may_have_different_grids_and_cuts():
    found = plan(
        6,
        "parallel.pipeline.stages=2",
        "parallel.pipeline.stage_grids=[2x1x1x2,1x2x1x1]",
        "parallel.pipeline.cuts='1'",
    )
    assert [stage.sizes for stage in found.stages] == [GridSizes(2, 1, 1, 2), GridSizes(1, 2, 1, 1)]
    assert [stage.ranks for stage in found.stages] == [(0, 1, 2, 3), (4, 5)]
    assert [stage.parts for stage in found.stages] == [((0, 2),), ((2, 6),)]
    assert [found.micro_batch_size(stage) for stage in found.stages] == [1, 2]


def test_interleaved_stages_have_several_parts():
    interleaved = "parallel.pipeline.schedule=interleaved_1f1b"
    found = plan(2, "parallel.pipeline.stages=2", interleaved, "parallel.pipeline.chunks_per_stage=2")
    assert [stage.parts for stage in found.stages] == [((0, 2), (3, 4)), ((2, 3), (4, 6))]
    assert found.microbatches == 8


STAGES = "parallel.pipeline.stages=2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.pipeline.stages=8"], "stages=8: the model has 4 block"),
        (["parallel.pipeline.stages=3"], "stages=3: does not divide the 8 process"),
        ([STAGES, "train.micro_batch_size=1"], "train.micro_batch_size=1: .* use parallel.pipeline.microbatches"),
        ([STAGES, "parallel.pipeline.microbatches=3"], "microbatches=3: .* use one of 1, 2, 4"),
        ([STAGES, "train.batch_size=6"], "train.batch_size=6: cannot be split over parallel.gdata·gz=4"),
        ([STAGES, "parallel.pipeline.cuts=[2,3]"], "2 parts of the model have 1 cut"),
        ([STAGES, "parallel.pipeline.cuts=[4]"], "use numbers from 1 to 3"),
        ([STAGES, "parallel.pipeline.stage_grids=[2x2x1x1]"], r"1 grid\(s\) for parallel.pipeline.stages=2"),
        ([STAGES, "parallel.pipeline.stage_grids=[2x2x1x1,2x1x1x1]"], "have 6 devices, but this job has 8"),
        ([STAGES, "parallel.pipeline.stage_grids=[2x2,4x1]"], "not a list of grids"),
        ([STAGES, "parallel.pipeline.chunks_per_stage=2"], "use parallel.pipeline.schedule=interleaved_1f1b"),
        ([STAGES, "parallel.pipeline.strategy=signal"], "strategy=signal: use one of broadcast, send_recv"),
        ([STAGES, "parallel.pipeline.schedule=2f2b"], "use one of gpipe, 1f1b"),
        ([STAGES, "parallel.mode=atp", "parallel.d1=2"], "parallel.mode=atp has one stage"),
        (["parallel.pipeline.microbatches=4"], "there is one stage; set parallel.pipeline.stages"),
        (
            [STAGES, "parallel.chunks=3"],
            r"microbatches: .* gdata·gz \(4, 4\), cuts each share into parallel.chunks=3; use a multiple of 12",
        ),
        (
            [STAGES, "parallel.gx=4", "parallel.sequence_parallel=true", "train.seq_len=6", "train.batch_size=3"],
            r"over its gx \(4, 4\) for parallel.sequence_parallel; use a multiple of 2",
        ),
        (
            [STAGES, "parallel.pipeline.schedule=interleaved_1f1b", "train.batch_size=4"],
            "interleaved_1f1b takes a multiple of 2 microbatches; use a multiple of 8",
        ),
        (
            [STAGES, "parallel.pipeline.stage_grids=[1x1x1x4,1x1x1x4]", "parallel.gx=2"],
            "parallel.gx=2: parallel.pipeline.stage_grids has the grid of each stage",
        ),
        (
            ["train.loss_chunks=2", "train.seq_len=21"],
            "loss_chunks=2: does not divide train.seq_len=21; use one of 1, 3, 7",
        ),
    ],
)
def test_mistakes_are_one_line_with_key_value_and_remedy(settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        plan(8, *settings)
    assert "\n" not in str(raised.value)
