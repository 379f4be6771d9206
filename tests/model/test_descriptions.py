"""A family's description has the same parameters, edges and divisibility as its model."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.model import registry
from gpt4d.model.parts import STREAM
from gpt4d.parallel.context import Context
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.sharded_weights import ShardedWeights
from tests.support.grids import TINY_MODEL, build_tiny_stage, tiny_batch
from tests.support.settings import configured


def test_described_parameters_are_those_of_the_model():
    config = configured([]).model
    weights = ShardedWeights(Context(Grid.single_device(), torch.float32), device="meta")
    model = registry.build(config, weights)
    described = {n: (s.shape, s.layout, s.mean) for n, s in registry.describe(config).parameters.items()}
    built = {n: (p.spec.shape, p.spec.layout, p.spec.mean) for n, p in model.named_parameters()}
    assert list(described.items()) == list(built.items())


def stream_shapes(sizes):
    """On a rank: the shape of the activation around each block, and the shape in the description's layout."""
    grid = Grid(sizes)
    module, shapes = build_tiny_stage(grid).module, []
    for layer in [*module.blocks.values(), module.norm]:
        layer.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    with torch.no_grad():
        module(*tiny_batch(grid)[::2])
    stream = registry.describe(TINY_MODEL).tensors[STREAM]
    return shapes, grid.local_shape(stream.shape(4, 12), stream.layout)


def test_activations_between_blocks_have_the_described_layout(ranks):
    for shapes, expected in ranks.run(8, stream_shapes, GridSizes(2, 2, 2, 1)):
        assert shapes == [expected] * (TINY_MODEL.layers + 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "gemma3", "unet"])
def test_adapters_and_relative_widths_may_differ_from_a_checkpoints_and_positions_are_structure(name):
    family = registry.get(name)
    assert not {"name", "lora", "width"} & {*family.structure}
    assert {*family.positions} <= {*family.structure}
