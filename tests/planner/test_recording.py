"""The recorded work of a few blocks represents all blocks."""

import pytest

from gpt4d.config import GridSizes
from gpt4d.model import registry
from gpt4d.planner import recording
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.recording import Settings, few_blocks, recording_of
from tests.support.grids import full
from tests.support.settings import configured

MODELS = {
    "gpt2": ["model=gpt_tiny", "model.layers=7"],
    "gemma3": ["model=gemma3_tiny", "model.layers=14", "model.global_every=3"],
    "unet": ["model=unet_tiny", "model.blocks_per_level=4", "train.seq_len=1"],
}
SETTINGS = [
    ["parallel.chunks=2"],
    ["parallel.chunks=2", "train.activation_checkpointing=full", "parallel.cache_layers=2"],
    ["parallel.sequence_parallel=true", "train.activation_checkpointing=selective", "parallel.cache_layers=all"],
    ["parallel.pipeline.stages=2", "parallel.pipeline.schedule=zb_h1"],
]
GRID, MICRO_BATCH = GridSizes(2, 2, 2, 1), 2


def walked(description, config) -> tuple[float, ...]:
    """Return the seconds, bytes and memory of a step."""
    walk = Estimate(config, GRID, description).walk(MICRO_BATCH, description.blocks)
    device = walk.run(3)
    return *device.totals(), device.peak, device.held, *sum(walk.after_forward + walk.after_backward, ())


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (full if (i + j) % 2 else pytest.param)(model, settings, id=f"{model} {' '.join(settings)}")
        for i, model in enumerate(MODELS)
        for j, settings in enumerate(SETTINGS)
    ],
)
def test_all_blocks_do_what_a_few_have_recorded(monkeypatch, model, settings):
    if model == "unet":
        settings = [word for word in settings if not word.startswith("parallel.sequence_parallel")]
    config = configured([*MODELS[model], *settings, "cluster=perlmutter"])
    whole = registry.describe_run(config, [GRID])
    # The model, and a stage of two parts.
    for description in (whole, whole.stage([(1, 4), (5, len(whole.units))])):
        found = walked(description, config)
        monkeypatch.setattr(recording, "few_blocks", lambda reduced, model: [unit.name for unit in reduced.blocks])
        recording.represented.cache_clear()
        assert walked(description, config) == pytest.approx(found, rel=1e-9)
        monkeypatch.undo()
        recording.represented.cache_clear()


def test_three_of_many_equal_blocks_are_recorded():
    config = configured(["model=gpt_80b"])
    description = registry.describe_run(config)
    assert few_blocks(description, description) == ["blocks.0", "blocks.1", "blocks.2"]
    assert few_blocks(description.with_blocks(["blocks.5", "blocks.30"]), description) == ["blocks.0", "blocks.1"]


def test_grids_that_differ_in_z_and_data_share_a_recording():
    config = configured(["model=gpt_tiny"])
    description, before = registry.describe_run(config), recording.recorded_segments.cache_info().misses
    for sizes in (GridSizes(2, 2), GridSizes(2, 2, 4, 1), GridSizes(2, 2, 1, 8)):
        recording_of(description, ["blocks.0", "blocks.1"], Settings.of(config, sizes, micro_batch=1))
    assert recording.recorded_segments.cache_info().misses == before + 1


def test_equal_parts_of_pipelines_share_a_recording():
    config = configured(["model=gpt_tiny", "model.layers=12"])
    description, before = registry.describe_run(config), recording.recorded_segments.cache_info().misses
    for first, stop in ((4, 8), (5, 9), (3, 11)):
        part = description.stage([(first, stop)])
        recording_of(part, [unit.name for unit in part.blocks], Settings.of(config, GridSizes(2), micro_batch=1))
    assert recording.recorded_segments.cache_info().misses == before + 1
