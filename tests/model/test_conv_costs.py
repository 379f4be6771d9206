"""The planned collectives of image layers equal the collectives of a step, in the same order, and computation agrees.

The model has each of these layers, on streams that alternate between a split over y and a split over x.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, ParallelConfig, TrainConfig
from gpt4d.model.description import Description, EdgeTensor, Tensors, units_of
from gpt4d.model.init import initialize
from gpt4d.model.module import Model
from gpt4d.model.parts import Part
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone, run_blocks
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.embedding import ScaleShiftSpec, TimeEmbeddingSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.layer import LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec, concatenate
from gpt4d.parallel.layers.loss import squared_error
from gpt4d.parallel.layers.sequence import tokens_of
from gpt4d.parallel.layers.sharding import NORMAL, TRANSPOSED, Axes
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.stage import Stage
from gpt4d.planner.device import Links
from gpt4d.planner.step import StepWalk
from gpt4d.step import TrainStep
from tests.model.recording import recorded_collectives
from tests.support.fake_time import FakeTime
from tests.support.grids import grid_name, token_loss

FLOPS, LAUNCH_US = 2e10, 0.1
C, T, HEADS, SIDE, BATCH = 48, 32, 8, 8, 48
CUT = 3  # groups: every grid cuts them
EMBEDDING, STREAMS = "embedding", ("first", "lowered", "raised")


class LowerSpec(LayerSpec):
    """Halves the resolution; y splits the channels of input and output, x those between them."""

    def layers(self):
        return {
            "norm": GroupNormSpec(CUT, (C,), activates=True),
            "widen": Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1),
            "inner": GroupNormSpec(2 * CUT, (2 * C,), "x", activates=True),
            "scale": ScaleShiftSpec(T, 2 * C, "x"),
            "narrow": Conv2dSpec(2 * C, C, 1, Axes("x", None), scatter_output=True),
            "lower": Conv2dSpec(C, C, 3, TRANSPOSED, stride=2, padding=1),
        }

    async def forward(self, layer, x, embedding, samples):
        x = layer.inner(await layer.widen(layer.norm(x)), *await layer.scale(embedding))
        return await layer.lower(await layer.narrow(x))


class RaiseSpec(LayerSpec):
    """Attends to the pixels of a stream that y splits, and doubles its resolution; x splits the result."""

    def layers(self):
        return {
            "norm": GroupNormSpec(CUT, (C,)),
            "qkv": LinearSpec(C, C, num_fused=3, heads=HEADS),
            "core": FusedAttentionSpec(HEADS, causal=False),
            "output": LinearSpec(C, C, transposed=True, heads=HEADS),
            "higher": Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1, upsampling=2),
        }

    async def forward(self, layer, x, embedding, samples):
        pixels = replace(samples, length=x.shape[1] * x.shape[2])
        mixed = await layer.core(await layer.qkv(layer.norm(x).flatten(0, 2)), pixels)
        return await layer.higher((await layer.output(mixed)).view_as(x))


@dataclass(frozen=True)
class PicturesSpec(LayerSpec):
    """A model of images, or parts of one."""

    parts: tuple[Part, ...] = ()

    def of_parts(self, parts: Sequence[Part]) -> "PicturesSpec":
        return PicturesSpec(tuple(parts))

    def layers(self):
        layers = {}
        if any(part.begins for part in self.parts):
            layers |= {"time": TimeEmbeddingSpec(16, T), "first": Conv2dSpec(3, C, 3, Axes(None, "y"), padding=1)}
        blocks = LowerSpec(), RaiseSpec()
        layers["blocks"] = LayersSpec({str(index): blocks[index] for part in self.parts for index in part.blocks})
        if any(part.ends for part in self.parts):
            layers["back"] = Conv2dSpec(2 * C, C, 1, TRANSPOSED)
            layers["norm"] = GroupNormSpec(CUT, (C, C))
            layers["last"] = Conv2dSpec(2 * C, 3, 3, Axes("y", None), padding=1)
        return layers

    def compute(self, model, part: Part, received: Mapping[str, Any], pictures, steps, sample_ids, targets):
        tensors = dict(received)
        if part.begins:
            tensors[EMBEDDING], tensors[STREAMS[0]] = run_alone(model.time(steps)), run_alone(model.first(pictures))
        if part.blocks:
            blocks = [getattr(model.blocks, str(index)) for index in part.blocks]
            samples = tokens_of(model.weights, sample_ids, length=1)
            x, embedding = tensors[STREAMS[part.blocks[0]]], tensors[EMBEDDING]
            tensors[STREAMS[part.blocks[-1] + 1]] = run_blocks(model.weights, blocks, x, embedding, samples)
        if not part.ends:
            return {name: tensor for name, tensor in tensors.items() if name not in received}
        whole = concatenate((run_alone(model.back(tensors[STREAMS[-1]])), tensors[STREAMS[0]]), (C, C))
        return {"loss": squared_error(run_alone(model.last(model.norm(whole))), targets)}

    def planned_batch(self, tensor, samples: int, length: int):
        pictures, numbers = ((samples, SIDE, SIDE, 3), "float32"), ((samples,), "int64")
        return tuple(tensor(*given) for given in (pictures, numbers, numbers, pictures))


def edge(axis: str, side: int, channels: int) -> EdgeTensor:
    layout = Layout(("data", "z"), (), (), (axis,))
    return EdgeTensor(layout, lambda samples, length: (samples, side, side, channels))


DESCRIPTION = Description(
    model=PicturesSpec().of_parts,
    parts=(
        units_of(
            ["lower", "raise"],
            first=Tensors(produces=(EMBEDDING, STREAMS[0])),
            blocks=[Tensors((STREAMS[index + 1],), (STREAMS[index], EMBEDDING)) for index in range(2)],
            last=Tensors(uses=(STREAMS[0], STREAMS[-1])),
        ),
    ),
    rules=(),
    tensors={
        EMBEDDING: EdgeTensor(Layout(("data", "z"), ()), lambda samples, length: (samples, T)),
        **dict(zip(STREAMS, (edge("y", SIDE, C), edge("y", SIDE // 2, C), edge("x", SIDE, 2 * C)), strict=True)),
    },
)


def build(config: Config, sizes: GridSizes) -> tuple[TrainStep, tuple]:
    """Return a step of rank 0 and its microbatch."""
    parallel, samples = config.parallel, BATCH // sizes.batch_shards
    grid = Grid(sizes)
    settings = {"num_chunks": parallel.chunks, "scatter_heads": parallel.scatter_heads}
    weights = ShardedWeights(Context(grid, torch.float32, parallel.overlap, **settings))
    module = Model(DESCRIPTION.spec, weights)
    weights.bind(dict(module.named_parameters()))
    initialize(module, 0, grid)
    cached = DESCRIPTION.weights_of(DESCRIPTION.cached_units(parallel.cache_layers))
    stage = Stage(
        0,
        grid,
        weights,
        module,
        dict(enumerate(DESCRIPTION.spec.parts)),
        {0: DESCRIPTION.layer_weights(False)},
        dict(DESCRIPTION.contributions),
        cached,
        chunk_contributions=DESCRIPTION.chunk_contributions(parallel.chunks),
    )
    pictures, numbers = torch.zeros(samples, SIDE, SIDE, 3), torch.arange(samples)
    return TrainStep(stage, whole_model(token_loss), OptimConfig()), (pictures, numbers, numbers, pictures)


def config_of(**parallel) -> Config:
    cluster = ClusterConfig(device="cuda", matmul_tflops=FLOPS / 1e12, memory_gb_s=1000, operation_us=LAUNCH_US)
    train = TrainConfig(batch_size=BATCH, precision="fp32", seq_len=1, compile=False)
    return Config(cluster=cluster, train=train, parallel=ParallelConfig(**parallel))


def walk_of(config: Config, sizes: GridSizes) -> StepWalk:
    cached = DESCRIPTION.cached_units(config.parallel.cache_layers)
    return StepWalk(config, DESCRIPTION, sizes, Links(config.cluster, sizes), BATCH // sizes.batch_shards, cached)


def test_parameters_are_those_of_the_description():
    module = Model(DESCRIPTION.spec, ShardedWeights(Context(Grid.single_device(), torch.float32)))
    specs = {name: (p.spec.shape, p.spec.layout.dims) for name, p in module.named_parameters()}
    assert specs == {name: (spec.shape, spec.layout.dims) for name, spec in DESCRIPTION.parameters.items()}


@pytest.mark.parametrize(
    ("sizes", "parallel"),
    [
        ((1, 1, 1, 1), {}),
        ((2, 2, 1, 1), {}),
        ((2, 1, 2, 1), {"chunks": 2}),
        ((1, 2, 2, 2), {"cache_layers": "all"}),
        ((2, 4, 1, 1), {"scatter_heads": False, "chunks": 4}),
        ((4, 2, 2, 1), {"chunks": 2}),
    ],
    ids=str,
)
def test_planned_collectives_of_pictures_are_those_of_a_step_in_the_same_order(rank_0, sizes, parallel):
    sizes, config = GridSizes(*sizes), config_of(**parallel)
    rank_0(sizes.devices)
    step, batch = build(config, sizes)
    with recorded_collectives() as (started, planned):
        step([batch], 1, BATCH, 1e-3)
        device = walk_of(config, sizes).run(1)
    assert started == planned
    assert len(started) > 20 or sizes.devices == 1
    assert device.held >= 0


@pytest.mark.parametrize(("memory_gb_s", "within"), [(1000, 0.03), (0.3, 0.1)])
@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 2, 2, 1), GridSizes(1, 4, 1, 1)], ids=grid_name)
def test_planned_computation_of_pictures_takes_as_long_as_a_steps_operations(rank_0, sizes, memory_gb_s, within):
    """The virtual device counts an operand that the kernel of an input's gradient does not read.

    It does not count operations on small tensors, such as the statistics of a norm.
    """
    rank_0(sizes.devices)
    config = config_of()
    config.cluster.memory_gb_s = memory_gb_s
    step, batch = build(config, sizes)
    with VirtualDevice(FLOPS, memory_gb_s, LAUNCH_US, source=FakeTime()) as device:
        step([batch], 1, BATCH, 1e-3)
    assert walk_of(config, sizes).run(1).compute_s == pytest.approx(device.stream.busy_s, rel=within)
