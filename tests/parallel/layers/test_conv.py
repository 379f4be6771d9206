"""Convolutions, GroupNorm, concatenations and the layers around them against torch.nn in float64, alone, on grids."""

import math
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.parallel.comm import collectives
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone, run_blocks
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.conv import Conv2dSpec, Convolution
from gpt4d.parallel.layers.embedding import ScaleShiftSpec, TimeEmbeddingSpec, sinusoids
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec, concatenate
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.layers.sharding import NORMAL, TRANSPOSED, Axes
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.sharded_weights import ShardedWeights
from tests.parallel.layers.oracle import check_cases, close, fill, normal, part, weights_on
from tests.support.grids import BINARY_GRIDS, global_tensor, sampled

BATCH = ("data", "z")
GRIDS = [*BINARY_GRIDS, GridSizes(4, 2, 1, 1), GridSizes(1, 4, 2, 1)]


def pixels(axis):
    """Return the layout of an activation."""
    return Layout(BATCH, (), (), (axis,) if axis else ())


def first_channels(x):
    return x.movedim(-1, 1)


def last_channels(x):
    return x.movedim(1, -1)


def conv(sizes, channels, kernel, axes, options):
    """On a rank: one convolution, its gradients and the bytes it sends."""
    weights = weights_on(sizes)
    layer = Layer(Conv2dSpec(*channels, kernel, axes, **options), weights)
    total = GradientReducer(weights, dict(layer.named_parameters()))
    kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
    inputs, weight, bias = normal(8, 6, 4, channels[0]), normal(*channels[::-1], kh, kw, seed=1), normal(channels[1])
    order = (1, 0, 2, 3) if axes.produced is None else (0, 1, 2, 3)  # dims of the stored weight
    fill(layer.weight, weight.permute(order), weights)
    fill(layer.bias, bias, weights)
    in_layout = pixels(axes.contracted)
    out_layout = pixels(axes.contracted if options.get("scatter_output") else axes.produced)
    mine = part(inputs, weights, in_layout).requires_grad_()
    ours = run_alone(layer(mine))

    inputs, weight, bias = (t.requires_grad_() for t in (inputs, weight, bias))
    pictures = first_channels(inputs)
    if (factor := options.get("upsampling", 1)) > 1:
        pictures = F.interpolate(pictures, scale_factor=factor, mode="nearest")
    places = {key: options[key] for key in ("stride", "padding") if key in options}
    theirs = last_channels(F.conv2d(pictures, weight, bias, **places))
    upstream = normal(*theirs.shape, seed=3)
    ours.backward(part(upstream, weights, out_layout))
    theirs.backward(upstream)
    close(ours, part(theirs, weights, out_layout))
    close(mine.grad, part(inputs.grad, weights, in_layout))
    total.finish()
    for parameter, whole in ((layer.weight, weight.grad.permute(order)), (layer.bias, bias.grad)):
        close(parameter.grad, part(whole, weights, parameter.spec.layout))


CONVOLUTIONS = {
    "normal": ((8, 16), 3, NORMAL, {"padding": 1}),
    "transposed": ((16, 8), 3, TRANSPOSED, {"padding": 1}),
    "1x1": ((8, 16), 1, TRANSPOSED, {}),
    "any kernel, stride and padding": ((16, 16), (2, 3), NORMAL, {"stride": (1, 2), "padding": (0, 1)}),
    "downsampling": ((8, 16), 3, TRANSPOSED, {"stride": 2, "padding": 1}),
    "upsampling": ((16, 8), 3, NORMAL, {"padding": 1, "upsampling": 2}),
    "of pictures": ((3, 16), 3, Axes(None, "y"), {"padding": 1}),
    "to pictures": ((16, 3), 3, Axes("y", None), {"padding": 1}),
    "scattered": ((16, 8), 1, Axes("x", None), {"scatter_output": True}),
}


@pytest.mark.parametrize("sizes", sampled(GRIDS))
def test_a_convolution_is_algorithm_1(ranks, sizes):
    ranks.run(sizes.devices, check_cases, conv, sizes, list(CONVOLUTIONS.values()))


def group_norm(sizes, channels, groups, axis, offset, activates=False):
    """On a rank: a norm of a concatenation, of which every rank has its channels of each part.

    With ``activates`` it is scaled, shifted and activated.
    """
    weights = weights_on(sizes)
    layer = Layer(GroupNormSpec(groups, channels, axis, activates=activates), weights)
    order = sharding.interleaved_order(channels)
    count = sum(channels)
    parts = [normal(4, 3, 5, size, seed=seed) + offset for seed, size in enumerate(channels)]
    weight, bias, upstream = normal(count, seed=11), normal(count, seed=12), normal(4, 3, 5, count, seed=13)
    fill(layer.weight, weight[order], weights)
    fill(layer.bias, bias[order], weights)
    layout, of_channels = Layout((), (), (), (axis,)), Layout((), (axis,))
    mine = [part(whole, weights, layout).requires_grad_() for whole in parts]
    changes = [normal(4, count, seed=seed) for seed in (14, 15)] if activates else []  # scale and shift
    mine_changes = [part(change[..., order], weights, of_channels).requires_grad_() for change in changes]
    ours = layer(concatenate(mine, channels), *mine_changes)
    ours.backward(part(upstream[..., order], weights, layout))

    whole = [t.requires_grad_() for t in (*parts, weight, bias)]
    changes = [change.requires_grad_() for change in changes]
    # Not F.group_norm, whose gradients lose digits to an offset.
    grouped = first_channels(torch.cat(parts, -1)).unflatten(1, (groups, -1))
    normalized = F.layer_norm(grouped, grouped.shape[2:], eps=1e-5)
    theirs = last_channels(normalized.flatten(1, 2)) * weight + bias
    if activates:
        scale, shift = (change[:, None, None] for change in changes)
        theirs = F.silu(theirs * (1 + scale) + shift)
    theirs.backward(upstream)
    bound = 1e-13 * (1 + offset)
    found = [ours, *(t.grad for t in mine), layer.weight.grad, layer.bias.grad, *(t.grad for t in mine_changes)]
    expected = [theirs[..., order], *(t.grad for t in whole[:-2])]
    expected += [t.grad[..., order] for t in (weight, bias, *changes)]
    layouts = [layout] * (1 + len(channels)) + [Layout((axis,))] * 2 + [of_channels] * len(changes)
    for one, other, where in zip(found, expected, layouts, strict=True):
        other = part(other, weights, where)
        assert (one - other).norm() <= bound * other.norm()
    return weights.context.grid[axis].traffic.read()["bytes"]


# Channels, groups and ranks: complete groups on each rank; a rank cuts every group; ranks cut some groups; a group
# straddles two parts of a concatenation; a group of all channels.
NORMS = [
    ((16,), 8, 4, False),
    ((24,), 6, 4, True),
    ((24,), 2, 4, True),
    ((24,), 4, 3, True),
    ((16, 8), 4, 2, True),
    ((16, 8), 6, 2, False),
    ((16, 8), 2, 4, True),
    ((8, 24), 1, 2, True),
    ((8, 4, 4), 4, 4, True),
]


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_groups_are_those_of_all_channels_wherever_ranks_cut_them(ranks, parts):
    """Only statistics are sent, and only if a group is cut. An offset must not cost digits."""
    norms = [norm for norm in NORMS if norm[2] == parts]
    for offset, activates in ((0.0, False), (0.0, True), (1000.0, False)):
        cases = [(channels, groups, "y", offset, activates) for channels, groups, *_ in norms]
        sent = ranks.run(parts, check_cases, group_norm, GridSizes(1, parts), cases)
        statistics = [4 * groups * 8 * cut for _, groups, _, cut in norms]
        assert sent == [[((parts - 1) * 3 + 2 * (parts - 1) / parts * 2) * size for size in statistics]] * parts


def test_a_norm_of_channels_over_x(ranks):
    ranks.run(4, group_norm, GridSizes(2, 2), (8, 4), 3, "x", 0.0)


def test_the_order_of_a_concatenation_keeps_that_of_its_parts():
    order = sharding.interleaved_order((8, 4))
    assert order == [0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11]
    assert sharding.interleaved_order((6,)) == list(range(6))
    for parts in (2, 4):
        for rank in range(parts):
            own = set(order[rank * 12 // parts : (rank + 1) * 12 // parts])
            assert own == {*range(rank * 8 // parts, (rank + 1) * 8 // parts)} | {
                *range(8 + rank * 4 // parts, 8 + (rank + 1) * 4 // parts)
            }


def attention(sizes, stream_axis):
    """On a rank: an attention of pixels over heads, on a stream that ``stream_axis`` splits."""
    weights = weights_on(sizes)
    other, heads, channels = {"x": "y", "y": "x"}[stream_axis], 4, 16
    qkv = Layer(LinearSpec(channels, channels, axes=Axes(stream_axis, other), num_fused=3, heads=heads), weights)
    output = Layer(LinearSpec(channels, channels, axes=Axes(other, stream_axis), transposed=True, heads=heads), weights)
    core = Layer(FusedAttentionSpec(heads, causal=False, stream=stream_axis), weights)
    parameters = {f"{n}.{p}": v for n, m in (("qkv", qkv), ("output", output)) for p, v in m.named_parameters()}
    total = GradientReducer(weights, parameters)
    whole = {name: normal(*p.spec.shape, seed=i).mul_(0.3) for i, (name, p) in enumerate(parameters.items())}
    for name, parameter in parameters.items():
        fill(parameter, whole[name], weights)
    inputs, upstream, layout = normal(8, 2, 3, channels, seed=7), normal(8, 2, 3, channels, seed=8), pixels(stream_axis)
    mine = part(inputs, weights, layout).requires_grad_()

    async def ours_of(x):
        rows = x.flatten(0, 2)
        mixed = await core(await qkv(rows), TokenIndex(torch.arange(len(x)), 6, weights.context.grid.axis(None)))
        return (await output(mixed)).view(x.shape)

    ours = run_alone(ours_of(mine))
    ours.backward(part(upstream, weights, layout))
    total.finish()

    for tensor in (inputs, *whole.values()):
        tensor.requires_grad_()
    values = torch.einsum("bhwc,ckn->bhwkn", inputs, whole["qkv.weight"]) + whole["qkv.bias"]
    q, k, v = values.flatten(1, 2).unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = (q @ k.mT / (channels // heads) ** 0.5).softmax(-1) @ v
    theirs = mixed.transpose(1, 2).reshape(inputs.shape) @ whole["output.weight"] + whole["output.bias"]
    theirs.backward(upstream)
    bound = 1e-12
    for one, other in [(ours, part(theirs, weights, layout)), (mine.grad, part(inputs.grad, weights, layout))] + [
        (p.grad, part(whole[name].grad, weights, p.spec.layout)) for name, p in parameters.items()
    ]:
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS))
def test_pixels_attend_to_all_pixels_on_a_stream_that_either_axis_splits(ranks, sizes):
    ranks.run(sizes.devices, check_cases, attention, sizes, [("x",), ("y",)])


def time_embedding(sizes, axis):
    """On a rank: the embedding of timesteps, and the scale and shift of one block."""
    weights = weights_on(sizes)
    time, block = Layer(TimeEmbeddingSpec(8, 16), weights), Layer(ScaleShiftSpec(16, 8, axis), weights)
    layers = torch.nn.ModuleDict({"time": time, "block": block})
    parameters = dict(layers.named_parameters())
    total = GradientReducer(weights, parameters)
    whole = {name: normal(*p.spec.shape, seed=i) for i, (name, p) in enumerate(parameters.items())}
    for name, parameter in parameters.items():
        fill(parameter, whole[name], weights)
    steps, upstream = torch.arange(8.0).double() * 100, [normal(8, 8, seed=seed) for seed in (7, 8)]
    layout = Layout(BATCH, (axis,))

    async def scale_and_shift():
        return await layers["block"](await layers["time"](part(steps, weights, Layout(BATCH))))

    ours = run_alone(scale_and_shift())
    torch.autograd.backward(ours, [part(gradient, weights, layout) for gradient in upstream])
    total.finish()
    for tensor in whole.values():
        tensor.requires_grad_()
    angles = steps[:, None] * 10000.0 ** -(torch.arange(4).double() / 4)
    embedding = torch.cat((angles.cos(), angles.sin()), -1)
    embedding = F.silu(embedding @ whole["time.up.weight"] + whole["time.up.bias"])
    embedding = F.silu(embedding @ whole["time.down.weight"] + whole["time.down.bias"])
    values = embedding @ whole["block.linear.weight"].flatten(1) + whole["block.linear.bias"].flatten()
    theirs = values.chunk(2, -1)
    torch.autograd.backward(theirs, upstream)
    found = [(one, part(other, weights, layout)) for one, other in zip(ours, theirs, strict=True)]
    found += [(p.grad, part(whole[name].grad, weights, p.spec.layout)) for name, p in parameters.items()]
    for one, other in found:
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS))
def test_scales_and_shifts_come_from_one_embedding_on_all_ranks(ranks, sizes):
    ranks.run(sizes.devices, check_cases, time_embedding, sizes, [("x",), ("y",)])


def test_sinusoids_are_those_of_diffusers():
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    steps = torch.tensor([0, 1, 10, 999])
    theirs = embeddings.get_timestep_embedding(steps, 32, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert torch.equal(sinusoids(steps, 32), theirs)


class Residual(torch.nn.Module):
    """A block of a U-Net on a stream that y splits, with a scattered shortcut."""

    def __init__(self, weights):
        super().__init__()
        self.norm = Layer(GroupNormSpec(1, (8,), activates=True), weights)
        self.widen = Layer(Conv2dSpec(8, 16, 3, NORMAL, padding=1), weights)
        self.inner = Layer(GroupNormSpec(4, (16,), "x", activates=True), weights)
        self.scale = Layer(ScaleShiftSpec(16, 16, "x"), weights)
        self.narrow = Layer(Conv2dSpec(16, 8, 3, TRANSPOSED, padding=1), weights)
        self.shortcut = Layer(Conv2dSpec(8, 8, 1, Axes("y", None), scatter_output=True), weights)

    async def forward(self, x, embedding):
        inner = await self.widen(self.norm(x))
        inner = self.inner(inner, *await self.scale(embedding))
        return await self.shortcut(x) + await self.narrow(inner)


def blocks(sizes, options, delayed=False):
    """On a rank: global gradients of blocks in chunks, and the number of convolutions during each all-reduce."""
    weights = ShardedWeights(Context(Grid(sizes), torch.float64, **options), torch.float64)
    layers = torch.nn.ModuleList([Residual(weights), Residual(weights)])
    parameters = dict(layers.named_parameters())
    total = GradientReducer(weights, parameters)
    for seed, parameter in enumerate(parameters.values()):
        fill(parameter, normal(*parameter.spec.shape, seed=seed), weights)
    x, upstream, embedding = normal(8, 4, 4, 8, seed=91), normal(8, 4, 4, 8, seed=92), normal(8, 16, seed=93)
    x = part(x, weights, pixels("y")).requires_grad_()
    embedding = part(embedding, weights, Layout(BATCH, ())).requires_grad_()
    with overlapped() as beside:
        out = run_blocks(weights, layers, x, embedding)
        with weights.delaying_weight_gradients() if delayed else nullcontext():
            out.backward(part(upstream, weights, pixels("y")))
        if delayed:
            assert all(p.grad is None for p in parameters.values() if p.spec.streamed)
            weights.compute_delayed_gradients()
    total.finish()
    grads = {name: global_tensor(p.grad, p.spec, weights.context.grid) for name, p in parameters.items()}
    of_x = [(out, pixels("y")), (x.grad, pixels("y")), (embedding.grad, Layout(BATCH, ()))]
    for name, (tensor, layout) in zip(("out", "x", "embedding"), of_x, strict=True):
        shape = tuple(
            size * math.prod(getattr(sizes, axis) for axis in axes)
            for size, axes in zip(tensor.shape, layout.dims, strict=True)
        )
        grads[name] = global_tensor(tensor, ParameterSpec(shape, layout), weights.context.grid)
    return grads, beside


@contextmanager
def overlapped():
    """Record how many convolutions overlap with each all-reduce of a convolution's outputs or gradients."""
    beside, computed, start = [], [0], collectives.start_all_reduce

    def counted(compute):
        def call(*args, **options):
            computed[0] += 1
            return compute(*args, **options)

        return call

    def started(tensor, axis, *rest, parameter=None, **options):
        pending, begun = start(tensor, axis, *rest, parameter=parameter, **options), computed[0]
        if pending.run and parameter is not None and parameter.dim() == 4:
            wait = pending.run.wait

            def waited():
                beside.append(computed[0] - begun)
                wait()

            pending.run.wait = waited
        return pending

    with (
        patch.object(collectives, "start_all_reduce", started),
        patch.object(Convolution, "forward", counted(Convolution.forward)),
        patch.object(Convolution, "input_gradient", counted(Convolution.input_gradient)),
        patch.object(Convolution, "weight_gradient", counted(Convolution.weight_gradient)),
    ):
        yield beside


@pytest.fixture(scope="module")
def serial(ranks):
    ((expected, _),) = ranks.run(1, blocks, GridSizes(), {})
    return expected


@pytest.mark.parametrize(
    ("sizes", "options", "delayed"),
    [
        ((2, 2, 1, 1), {"num_chunks": 4}, False),
        ((1, 2, 2, 1), {"recompute": True}, False),
        ((2, 1, 1, 2), {"recompute": True, "num_chunks": 2}, False),
        ((2, 2, 2, 1), {"num_chunks": 2}, True),
        pytest.param((2, 2, 2, 1), {"recompute": True, "num_chunks": 2}, True, marks=pytest.mark.full),
        pytest.param((2, 2, 2, 2), {"recompute": True, "num_chunks": 2}, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_blocks_of_convolutions_are_exact_in_chunks_recomputed_and_delayed(ranks, serial, sizes, options, delayed):
    sizes = GridSizes(*sizes)
    grads, _ = ranks.run(sizes.devices, blocks, sizes, options, delayed)[0]
    for name, expected in serial.items():
        assert (grads[name] - expected).norm() <= 1e-12 * expected.norm(), name


def test_other_chunks_convolve_while_a_convolution_is_summed(ranks):
    """The weight's gradient overlaps with the all-reduce of the input's gradient. Only a last chunk's output waits."""
    for _, beside in ranks.run(4, blocks, GridSizes(2, 2), {"num_chunks": 4}):
        outputs_and_gradients = 2 * (2 + 2) * 4  # blocks, all-reduces, chunks
        assert len(beside) == outputs_and_gradients
        assert 8 * beside.count(0) <= len(beside)
