"""Planned collectives of layers of pictures are those of a step in the same order; planned computation takes as long.

The model has each of these layers, on streams that y and x split in turn.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.virtual import VirtualDevice
from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, ParallelConfig, TrainConfig
from gpt4d.model.attention_costs import AttentionCost
from gpt4d.model.conv_costs import (
    ConcatenationCost,
    Conv2dCost,
    GroupNormCost,
    ScaleShiftCost,
    TimeEmbeddingCost,
)
from gpt4d.model.costs import ActivationCost, SequenceCost, SimpleCost
from gpt4d.model.description import STREAM, Description, EdgeTensor, LayerCost, Unit
from gpt4d.model.init import initialize
from gpt4d.model.product_costs import LinearCost
from gpt4d.parallel.chunks import run_blocks
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.concatenation import concatenate
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.specs import NORMAL, TRANSPOSED, Axes
from gpt4d.parallel.layers.time_embedding import ScaleShift, TimeEmbedding
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.stage import Stage
from gpt4d.parallel.turns import run_alone
from gpt4d.parallel.weights import WeightStream
from gpt4d.planner.device import Links
from gpt4d.planner.step import StepWalk
from gpt4d.step import TrainStep
from tests.fake_time import FakeTime
from tests.grids import grid_name
from tests.model.recording import recorded_collectives

FLOPS, LAUNCH_US = 2e10, 0.1
C, T, HEADS, SIDE, BATCH = 48, 32, 8, 8, 16
CUT = 3  # groups: every grid cuts them


class Lower(nn.Module):
    """Halves the resolution, from a stream that y splits to one that x splits."""

    def __init__(self, weights):
        super().__init__()
        self.norm = Layer(GroupNormSpec(CUT, (C,)), weights)
        self.widen = Layer(Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1), weights)
        self.scale = ScaleShift(weights, T, 2 * C, "x")
        self.narrow = Layer(Conv2dSpec(2 * C, C, 1, Axes("x", None), scatter_output=True), weights)
        self.lower = Layer(Conv2dSpec(C, C, 3, TRANSPOSED, stride=2, padding=1), weights)

    async def forward(self, x, embedding):
        x = await self.scale(await self.widen(F.silu(self.norm(x))), embedding)
        return await self.lower(await self.narrow(x))


LOWER = (
    GroupNormCost("norm", GroupNormSpec(CUT, (C,)), SIDE**2),
    ActivationCost(C, C, "y", SIDE**2),
    Conv2dCost("widen", Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1), (SIDE, SIDE)),
    ScaleShiftCost("scale", T, 2 * C, SIDE**2, "x"),
    Conv2dCost("narrow", Conv2dSpec(2 * C, C, 1, Axes("x", None), scatter_output=True), (SIDE, SIDE)),
    Conv2dCost("lower", Conv2dSpec(C, C, 3, TRANSPOSED, stride=2, padding=1), (SIDE, SIDE)),
)


class Raise(nn.Module):
    """Attends to the pixels of a stream that y splits, and doubles its resolution; x splits the result."""

    def __init__(self, weights):
        super().__init__()
        axes = head_split(HEADS, weights)
        self.norm = Layer(GroupNormSpec(CUT, (C,)), weights)
        self.qkv = Layer(LinearSpec(C, C, num_fused=3, heads=HEADS), weights)
        self.core = AttentionCore(HEADS, 0.0, axes, causal=False)
        self.output = Layer(LinearSpec(C, C, transposed=True, heads=HEADS), weights)
        self.higher = Layer(Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1, upsampling=2), weights)

    async def forward(self, x, embedding):
        rows = self.norm(x).flatten(0, 2)
        mixed = self.core.of_fused(await self.qkv(rows), Tokens(torch.arange(len(x)), x.shape[1] * x.shape[2]))
        return await self.higher((await self.output(mixed)).view(x.shape))


HALF = SIDE // 2
RAISE = (
    GroupNormCost("norm", GroupNormSpec(CUT, (C,)), HALF**2),
    LinearCost("qkv", LinearSpec(C, C, num_fused=3, heads=HEADS), positions=HALF**2),
    AttentionCost(HEADS, C, False, positions=HALF**2),
    LinearCost("output", LinearSpec(C, C, transposed=True, heads=HEADS), positions=HALF**2),
    Conv2dCost("higher", Conv2dSpec(C, 2 * C, 3, NORMAL, padding=1, upsampling=2), (HALF, HALF)),
)


class Pictures(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights
        self.time = TimeEmbedding(weights, 16, T)
        self.first = Layer(Conv2dSpec(3, C, 3, Axes(None, "y"), padding=1), weights)
        self.blocks = nn.ModuleList([Lower(weights), Raise(weights)])
        self.back = Layer(Conv2dSpec(2 * C, C, 1, TRANSPOSED), weights)
        self.norm = Layer(GroupNormSpec(CUT, (C, C)), weights)
        self.last = Layer(Conv2dSpec(2 * C, 3, 3, Axes("y", None), padding=1), weights)

    def loss_sum(self, pictures, steps):
        embedding = run_alone(self.time(steps))
        first = run_alone(self.first(pictures))
        x = run_blocks(self.weights, self.blocks, first, embedding)
        whole = concatenate((run_alone(self.back(x)), first), (C, C))
        return run_alone(self.last(self.norm(whole))).square().sum()


class Sequence(SequenceCost):
    layers: tuple[LayerCost, ...] = ()

    def __init__(self, *layers: LayerCost):
        self.layers = layers


@dataclass(frozen=True)
class SquareCost(SimpleCost):
    nbytes_of_sample: int

    async def forward(self, walk):
        walk.compute(moved=3 * walk.samples * self.nbytes_of_sample, operations=2)

    async def backward(self, walk):
        walk.compute(moved=5 * walk.samples * self.nbytes_of_sample, operations=3)


FIRST = Conv2dCost("first", Conv2dSpec(3, C, 3, Axes(None, "y"), padding=1), (SIDE, SIDE), input_gradient=False)
DESCRIPTION = Description(
    units=(
        Unit("time", TimeEmbeddingCost(16, T)),
        Unit(
            "", Conv2dCost("first", Conv2dSpec(3, C, 3, Axes(None, "y"), padding=1), (SIDE, SIDE), input_gradient=False)
        ),
        Unit("blocks.0", Sequence(*LOWER), block=True),
        Unit("blocks.1", Sequence(*RAISE), block=True),
        Unit("", Conv2dCost("back", Conv2dSpec(2 * C, C, 1, TRANSPOSED), (SIDE, SIDE))),
        Unit("", ConcatenationCost((C, C), SIDE**2)),
        Unit("", GroupNormCost("norm", GroupNormSpec(CUT, (C, C)), SIDE**2)),
        Unit("", Conv2dCost("last", Conv2dSpec(2 * C, 3, 3, Axes("y", None), padding=1), (SIDE, SIDE))),
        Unit("", SquareCost(3 * SIDE**2 * 4)),
    ),
    rules=(),
    tensors={
        STREAM: EdgeTensor(Layout(("data", "z"), (), (), ("y",)), lambda samples, length: (samples, SIDE, SIDE, C))
    },
)


def build(config: Config, sizes: GridSizes) -> tuple[TrainStep, tuple]:
    """Return a step of rank 0 and its microbatch."""
    parallel, samples = config.parallel, BATCH // sizes.batch_shards
    grid = Grid(sizes)
    weights = WeightStream(
        grid, overlap=parallel.overlap, num_chunks=parallel.chunks, scatter_heads=parallel.scatter_heads
    )
    module = Pictures(weights)
    weights.bind(dict(module.named_parameters()))
    initialize(module, 0, grid)
    cached = DESCRIPTION.weights_of(DESCRIPTION.cached_units(parallel.cache_layers))
    stage = Stage(
        0,
        grid,
        weights,
        module,
        {0: None},
        {0: DESCRIPTION.layer_weights(False)},
        dict(DESCRIPTION.contributions),
        cached,
        chunk_terms=DESCRIPTION.chunk_terms(parallel.chunks),
    )
    step = TrainStep(stage, whole_model(lambda module, batch: module.loss_sum(*batch)), OptimConfig())
    return step, (torch.zeros(samples, SIDE, SIDE, 3), torch.zeros(samples))


def config_of(**parallel) -> Config:
    cluster = ClusterConfig(device="cuda", matmul_tflops=FLOPS / 1e12, memory_gb_s=1000, operation_us=LAUNCH_US)
    train = TrainConfig(batch_size=BATCH, precision="fp32", seq_len=1, compile=False)
    return Config(cluster=cluster, train=train, parallel=ParallelConfig(**parallel))


def walk_of(config: Config, sizes: GridSizes) -> StepWalk:
    cached = DESCRIPTION.cached_units(config.parallel.cache_layers)
    return StepWalk(config, DESCRIPTION, sizes, Links(config.cluster, sizes), BATCH // sizes.batch_shards, cached)


def test_parameters_are_those_of_the_description():
    module = Pictures(WeightStream(Grid.single_device()))
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


@pytest.mark.parametrize(("memory_gb_s", "within"), [(1000, 0.02), (0.3, 0.1)])
@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 2, 2, 1), GridSizes(1, 4, 1, 1)], ids=grid_name)
def test_planned_computation_of_pictures_takes_as_long_as_a_steps_operations(rank_0, sizes, memory_gb_s, within):
    """The virtual device counts an operand that the kernel of an input's gradient does not read."""
    rank_0(sizes.devices)
    config = config_of()
    config.cluster.memory_gb_s = memory_gb_s
    step, batch = build(config, sizes)
    with VirtualDevice(FLOPS, memory_gb_s, LAUNCH_US, source=FakeTime()) as device:
        step([batch], 1, BATCH, 1e-3)
    assert walk_of(config, sizes).run(1).compute_s == pytest.approx(device.stream.busy_s, rel=within)
