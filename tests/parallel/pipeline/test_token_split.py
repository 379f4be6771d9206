"""parallel.sequence_parallel over stages: the stream crosses with its tokens split over x, on each stage's own grid."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.layout import CHUNK, Layout
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.messages import rank_program
from gpt4d.parallel.resharding.plan import plan
from gpt4d.step import mask_replicas
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

PIPELINE = "parallel.pipeline."
GPT = (
    "model=gpt_tiny", "model.layers=3", "model.hidden=24", "model.heads=6", "model.vocab_size=258",
    "model.vocab_multiple=48", "model.max_positions=12", "train.seq_len=12", "train.batch_size=8", "model.dropout=0.1",
)  # fmt: skip
SPLIT, RECOMPUTED, CHUNKS = (
    "parallel.sequence_parallel=true",
    "train.activation_checkpointing=full",
    "parallel.chunks=2",
)


def step_of_gpt(config, world_size):
    """On a rank: the loss of an evaluation and of a step in float64, and this stage's parts of its gradients."""
    plan, stage = own_stage(config, world_size)
    grid = stage.grid
    parameters = {name: p for name, p in stage.module.named_parameters() if name not in stage.copies}
    data = RandomTokens(config, plan, stage)
    runtime = StageRuntime(stage, GradientReducer(stage.weights, parameters), data.compute)
    units = config.train.batch_size * config.train.seq_len
    losses = [
        runtime.evaluate(data.batches(1), plan.microbatches) / units,
        runtime.forward_backward(data.batches(0), plan.microbatches, units),
    ]
    losses = [grid.world.all_reduce(mask_replicas(loss, grid)).item() for loss in losses]
    if stage.exchange:
        stage.exchange.close()
    return losses, {name: (grid.local_slices(p.spec.shape, p.spec.layout), p.grad) for name, p in parameters.items()}


@pytest.fixture(scope="module")
def serial(ranks):
    losses, gradients = ranks.run(1, step_of_gpt, configured([*GPT]), 1)[0]
    return losses, {name: gradient for name, (_, gradient) in gradients.items()}


@pytest.mark.parametrize(
    ("grids", "settings"),
    [
        ("2x1x1x1,1x1x2x1", (SPLIT,)),
        ("3x1x1x1,2x1x1x1", (SPLIT, CHUNKS)),
        ("2x1x1x2,1x2x1x1", (SPLIT, RECOMPUTED, PIPELINE + "schedule=zb_h1")),
        ("2x1x2x1,1x1x1x1", (CHUNKS,)),
        full("2x1x1x1,1x1x2x1", (RECOMPUTED,)),
        full("1x1x1x2,2x2x1x1", (SPLIT, CHUNKS, RECOMPUTED)),
        full("2x1x2x1,2x1x1x1", (SPLIT, CHUNKS, PIPELINE + "schedule=eager_1f1b_w")),
    ],
    ids=str,
)
def test_a_gpt_with_split_tokens_over_stages_equals_one_device(ranks, serial, grids, settings):
    sizes = [GridSizes(*map(int, grid.split("x"))) for grid in grids.split(",")]
    world_size = sum(grid.devices for grid in sizes)
    config = configured([*GPT, PIPELINE + "stages=2", PIPELINE + f"stage_grids=[{grids}]", *settings])
    expected_losses, expected = serial
    seen = {}
    for losses, gradients in ranks.run(world_size, step_of_gpt, config, world_size):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, (place, part) in gradients.items():
            seen.setdefault(name, torch.full_like(expected[name], torch.nan))[place] = part
    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_a_device_sends_its_part_of_every_chunk():
    """Eight tokens in two chunks of which x has halves, to a stage whose data axis splits the batch first."""
    layout = Layout(("data", CHUNK, "x"))
    source = StageMesh.of_grid(range(2), GridSizes(x=2), chunks=2)
    destination = StageMesh.of_grid(range(2, 6), GridSizes(x=2, data=2), chunks=2)
    found = plan((8,), layout, source, layout, destination)
    tasks = [(task.tile[0], task.senders, task.receivers) for task in found.tasks]
    assert [(tile, receivers) for tile, _, receivers in tasks] == [
        ((i, i + 1), (2 + i // 4 * 2 + i % 2,)) for i in range(8)
    ]
    assert [senders for _, senders, _ in tasks] == [(i // 2 % 2,) for i in range(8)]
    steps = {step.task: step.slices for step in rank_program(found, 1, 8).steps}
    assert steps == {2: (slice(0, 1),), 3: (slice(1, 2),), 6: (slice(2, 3),), 7: (slice(3, 4),)}
    assert rank_program(found, 1, 8).shape == (4,) and rank_program(found, 5, 8).shape == (2,)
