"""Each layer against plain torch in float64, alone, on the grids whose axes it uses; and in bf16 on one device."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gpt4d.config import GridSizes, divisors
from gpt4d.parallel import kernels
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.activations import gelu_of_biased
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec, TokenEmbeddingSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec, TiedHeadSpec, concatenate
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import BranchNormSpec, HeadNormSpec, LayerNormFunction, LayerNormSpec, RMSNormSpec
from gpt4d.parallel.layers.sequence import Documents, TokenIndex
from gpt4d.parallel.layers.sharding import NORMAL, TRANSPOSED, Axes
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.sharded_weights import ShardedWeights
from tests.parallel.layers.oracle import check, check_cases, close, filled, normal, part, weights_on
from tests.support.grids import BINARY_GRIDS, PAIRWISE_GRIDS, full, grid_name, sampled

BATCH, FEATURES = ("data", "z"), Layout((), (), ("y",))
GRIDS = [*BINARY_GRIDS, GridSizes(4, 2, 1, 1), GridSizes(1, 4, 2, 1)]
SINGLE, *SAMPLE = PAIRWISE_GRIDS  # each grid occurs with a convolution or with an attention
WIDTH, TOKENS = 16, (8, 32)  # of layers in bf16, whose parameter gradients are sums in float32: none is rounded to bf16


def linear(sizes, transposed, parts):
    weights = weights_on(sizes)
    layer = Layer(LinearSpec(8, 12, transposed=transposed, num_fused=parts), weights)
    into, out = ("x", "y") if transposed else ("y", "x")

    def plain(parameters, x):
        weight, bias = parameters["weight"].reshape(8, -1), parameters["bias"]
        return (x @ weight + bias.flatten()).unflatten(-1, bias.shape)

    inputs, outputs = [(normal(8, 3, 8), Layout(BATCH, (), (into,)))], Layout(BATCH, (), *[()] * bool(parts), (out,))
    check(weights, layer, lambda x: run_alone(layer(x)), plain, inputs, [outputs])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 1), full((4, 2, 1, 1)), (1, 2, 2, 2)], ids=str)
def test_a_linear_layer_is_algorithm_1(ranks, sizes):
    sizes, cases = GridSizes(*sizes), itertools.product((False, True), (None, 3))  # transposed, parts
    ranks.run(sizes.devices, check_cases, linear, sizes, list(cases))


def layer_norm(sizes, offset):
    layer = Layer(LayerNormSpec(12), weights := weights_on(sizes))
    inputs = [(normal(4, 3, 12) + offset, FEATURES)]

    def plain(parameters, x):
        return F.layer_norm(x, (12,), *parameters.values(), 1e-5)

    check(weights, layer, lambda x: layer(x)[1], plain, inputs, [FEATURES], bound=1e-13 * (1 + offset))


@pytest.mark.parametrize("sizes", [GridSizes(1, 1), GridSizes(1, 3), GridSizes(2, 4)], ids=grid_name)
def test_layer_norm_takes_mean_and_variance_of_all_features(ranks, sizes):
    """The case with an offset fails if a difference of large squares loses digits."""
    ranks.run(sizes.devices, check_cases, layer_norm, sizes, [(0.0,), (1000.0,)])


def norm_of_stream(sizes, kind, added):
    layer = Layer(kind(12), weights := weights_on(sizes))
    inputs = [(normal(4, 3, 12, seed=1 + i), FEATURES) for i in range(1 + added)]

    def plain(parameters, *branches):
        stream, norm = sum(branches), F.layer_norm if kind is LayerNormSpec else F.rms_norm
        return stream, norm(stream, (12,), *parameters.values(), eps=1e-5)

    check(weights, layer, layer, plain, inputs, [FEATURES, FEATURES])


def norm_behind_a_branch(sizes, recomputes_inputs):
    layer = Layer(BranchNormSpec(12), weights := weights_on(sizes, training=Pass(recompute_inputs=recomputes_inputs)))
    inputs = [(normal(4, 3, 12, seed=i), FEATURES) for i in range(2)]

    def plain(parameters, x, branch):
        return x + F.rms_norm(branch, (12,), parameters["weight"], 1e-5)

    check(weights, layer, layer, plain, inputs, [FEATURES])


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(1, 2)], ids=grid_name)
def test_a_norm_adds_a_branch_to_the_stream_before_or_behind_it_and_the_gradients_of_both(ranks, sizes):
    cases = itertools.product((LayerNormSpec, RMSNormSpec), (False, True))  # kind, whether a branch is added
    ranks.run(sizes.devices, check_cases, norm_of_stream, sizes, list(cases))
    ranks.run(sizes.devices, check_cases, norm_behind_a_branch, sizes, [(False,), (True,)])  # recomputes inputs


def norm_of_all_heads(sizes, scatter):
    layer = Layer(HeadNormSpec(24, 12, across_heads=True), weights := weights_on(sizes, scatter_heads=scatter))
    layout = Layout((), (), weights.context.head_axes(12))

    def plain(parameters, x):
        return F.rms_norm(x, (24,), parameters["weight"], 1e-5)

    check(weights, layer, layer, plain, [(normal(4, 3, 24), layout)], [layout])


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(3), GridSizes(2, 2), GridSizes(2, 3)], ids=grid_name)
def test_a_norm_of_all_heads_is_one_norm_on_every_grid(ranks, sizes):
    ranks.run(sizes.devices, check_cases, norm_of_all_heads, sizes, [(False,), (True,)])


@pytest.mark.parametrize("tokens", [256, 192], ids=["two blocks", "one block"])
def test_gelu_computes_the_gradient_of_the_bias_in_its_input(tokens):
    product, bias, upstream = normal(tokens, 6), normal(2, 3, seed=1).requires_grad_(), normal(tokens, 6, seed=2)
    x = (product + bias.detach().flatten()).requires_grad_()
    ours = gelu_of_biased(x, bias)
    found = torch.autograd.grad(ours, (x, bias), upstream)
    wide = product.requires_grad_()
    theirs = F.gelu(wide + bias.flatten(), approximate="tanh")
    for one, other in zip((ours, *found), (theirs, *torch.autograd.grad(theirs, (wide, bias), upstream)), strict=True):
        close(one, other)


def cross_entropy(sizes, scale, ignored=0, z_loss=0.0):
    weights, layout, vocabulary = weights_on(sizes), Layout((), (), ("x",)), 9
    logits = normal(5, 7, 16) * scale
    targets = torch.randint(0, vocabulary, (5, 7), generator=torch.Generator().manual_seed(1))
    targets.flatten()[:ignored] = -1
    logits[..., vocabulary:] = 1e4  # padding, which must not take part: it exceeds everything else
    mine = part(logits, weights, layout).clone().requires_grad_()
    with patch.object(kernels, "BLOCK_ELEMENTS", 3 * mine.shape[-1]):  # the last of twelve blocks has two rows
        ours = cross_entropy_sum(mine, targets, vocabulary, weights.context.grid.x, z_loss, masked=ignored > 0)
        (3 * ours).backward()
    logits.requires_grad_()
    shown = logits[..., :vocabulary].flatten(0, 1)
    theirs = F.cross_entropy(shown, targets.flatten(), reduction="sum", ignore_index=-1)
    log_sums = shown.logsumexp(-1)[targets.flatten() >= 0]
    (3 * (theirs + z_loss * log_sums.square().sum())).backward()
    close(ours, theirs)
    close(mine.grad, part(logits.grad, weights, layout))


@pytest.mark.parametrize("sizes", [GridSizes(1), GridSizes(2), GridSizes(4)], ids=grid_name)
def test_cross_entropy_over_a_cut_vocabulary_leaves_out_padding_and_negative_targets(ranks, sizes):
    """A vocabulary of 9 in 16 columns: the third of four ranks has one token, the last rank has none.

    All targets may be negative. The z-loss changes only gradients.
    """
    cases = [(1.0,), (300.0,), (300.0, 20), (1.0, 35), (5.0, 0, 0.1), (300.0, 20, 0.01)]
    ranks.run(sizes.devices, check_cases, cross_entropy, sizes, cases)


class LargestResult(TorchDispatchMode):
    """Records the maximum number of bytes of an operation's result."""

    nbytes = 0

    def __torch_dispatch__(self, kernels, types, args=(), kwargs=None):
        result = kernels(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def test_cross_entropy_of_bfloat16_has_no_wider_copy_of_the_logits():
    logits = normal(64, 40).bfloat16().requires_grad_()
    targets = torch.arange(64) % 37
    expected = logits.detach().float().requires_grad_()
    theirs = F.cross_entropy(expected[:, :37], targets, reduction="sum")
    theirs.backward()
    with patch.object(kernels, "BLOCK_ELEMENTS", 10 * 40), LargestResult() as largest:
        ours = cross_entropy_sum(logits, targets, 37, Grid.single_device().x)
        ours.backward()
    assert largest.nbytes <= logits.nbytes
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad, expected.grad.bfloat16())


def pixels(axis):
    """Return the layout of an activation."""
    return Layout(BATCH, (), (), (axis,) if axis else ())


def first_channels(x):
    return x.movedim(-1, 1)


def last_channels(x):
    return x.movedim(1, -1)


def conv(sizes, channels, kernel, axes, options):
    """On a rank: one convolution and its gradients."""
    layer = Layer(Conv2dSpec(*channels, kernel, axes, **options), weights := weights_on(sizes))
    places = {key: options[key] for key in ("stride", "padding") if key in options}
    order = (1, 0, 2, 3) if axes.produced is None else (0, 1, 2, 3)  # dims of the stored weight

    def plain(parameters, x):
        x = first_channels(x)
        if (factor := options.get("upsampling", 1)) > 1:
            x = F.interpolate(x, scale_factor=factor, mode="nearest")
        return last_channels(F.conv2d(x, parameters["weight"].permute(order), parameters["bias"], **places))

    inputs = [(normal(8, 6, 4, channels[0]), pixels(axes.contracted))]
    outputs = [pixels(axes.contracted if options.get("scatter_output") else axes.produced)]
    check(weights, layer, lambda x: run_alone(layer(x)), plain, inputs, outputs)


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


@pytest.mark.parametrize("sizes", sampled(GRIDS, [SINGLE, SAMPLE[3]]))
def test_a_convolution_is_algorithm_1(ranks, sizes):
    ranks.run(sizes.devices, check_cases, conv, sizes, list(CONVOLUTIONS.values()))


def group_norm(sizes, channels, groups, axis, offset, activates=False):
    """On a rank: a norm of a concatenation, of which every rank has its channels of each part.

    With ``activates`` it is scaled, shifted and activated. The result is the number of bytes sent over ``axis``.
    """
    layer = Layer(GroupNormSpec(groups, channels, axis, activates=activates), weights := weights_on(sizes))
    order, parts, count = sharding.interleaved_order(channels), len(channels), sum(channels)

    def ours(*inputs):
        return layer(concatenate(inputs[:parts], channels), *inputs[parts:])

    def plain(parameters, *inputs):
        # Not F.group_norm, whose gradients lose digits to an offset.
        grouped = first_channels(torch.cat(inputs[:parts], -1)).unflatten(1, (groups, -1))
        normalized = last_channels(F.layer_norm(grouped, grouped.shape[2:], eps=1e-5).flatten(1, 2))
        out = normalized[..., order] * parameters["weight"] + parameters["bias"]
        if not activates:
            return out
        scale, shift = (change[:, None, None] for change in inputs[parts:])
        return F.silu(out * (1 + scale) + shift)

    layout = Layout((), (), (), (axis,))
    inputs = [(normal(4, 3, 5, size, seed=seed) + offset, layout) for seed, size in enumerate(channels)]
    inputs += [(normal(4, count, seed=seed), Layout((), (axis,))) for seed in (14, 15) if activates]
    check(weights, layer, ours, plain, inputs, [layout], bound=1e-13 * (1 + offset))
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
    for axis, offset, activates in (("y", 0.0, False), ("x", 0.0, True), ("y", 1000.0, False)):
        cases = [(channels, groups, axis, offset, activates) for channels, groups, *_ in norms]
        sent = ranks.run(parts, check_cases, group_norm, GridSizes(**{axis: parts}), cases)
        statistics = [4 * groups * 8 * cut for _, groups, _, cut in norms]
        assert sent == [[((parts - 1) * 3 + 2 * (parts - 1) / parts * 2) * size for size in statistics]] * parts


def test_the_order_of_a_concatenation_keeps_that_of_its_parts():
    order = sharding.interleaved_order((8, 4))
    assert order == [0, 1, 8, 2, 3, 9, 4, 5, 10, 6, 7, 11]
    assert sharding.interleaved_order((6,)) == list(range(6))
    for parts in (2, 4):
        for rank in range(parts):
            own = order[rank * 12 // parts : (rank + 1) * 12 // parts]
            first, second = ([*range(n)][rank * n // parts : (rank + 1) * n // parts] for n in (8, 4))
            assert sorted(own) == [*first, *(8 + channel for channel in second)]


def attention(sizes, stream_axis):
    """On a rank: an attention of pixels over heads, on a stream that ``stream_axis`` splits."""
    weights, other, heads, channels = weights_on(sizes), {"x": "y", "y": "x"}[stream_axis], 4, 16
    qkv = Layer(LinearSpec(channels, channels, axes=Axes(stream_axis, other), num_fused=3, heads=heads), weights)
    output = Layer(LinearSpec(channels, channels, axes=Axes(other, stream_axis), transposed=True, heads=heads), weights)
    core = Layer(FusedAttentionSpec(heads, causal=False, stream=stream_axis), weights)

    async def ours(x):
        tokens = TokenIndex(torch.arange(len(x)), 6, weights.context.grid.axis(None))
        mixed = await core(await qkv(x.flatten(0, 2)), tokens)
        return (await output(mixed)).view(x.shape)

    def plain(parameters, x):
        values = torch.einsum("bhwc,ckn->bhwkn", x, parameters["qkv.weight"]) + parameters["qkv.bias"]
        q, k, v = values.flatten(1, 2).unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / (channels // heads) ** 0.5).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(x.shape) @ parameters["output.weight"] + parameters["output.bias"]

    layers, layout = torch.nn.ModuleDict({"qkv": qkv, "output": output}), pixels(stream_axis)
    inputs = [(normal(8, 2, 3, channels), layout)]
    check(weights, layers, lambda x: run_alone(ours(x)), plain, inputs, [layout], bound=1e-12, scale=0.3)


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS, SAMPLE[1:3]))
def test_pixels_attend_to_all_pixels_on_a_stream_that_either_axis_splits(ranks, sizes):
    ranks.run(sizes.devices, check_cases, attention, sizes, [("x",), ("y",)])


MOST_HEADS = 40
SPLIT_HEADS = [
    (heads, key_value_heads, ranks)
    for heads in range(1, MOST_HEADS + 1)
    for key_value_heads in divisors(heads)
    for ranks in divisors(heads)
]


def attended(served):
    """Return the head of keys and values for each query of a rank, selected and repeated as the attention does."""
    if not sharding.serves_equally(served):
        return served  # a head for each query
    needed = range(served[0], served[-1] + 1)
    repeats, rest = divmod(len(served), len(needed))
    assert not rest, "repeating whole heads does not give one for each query"
    return [head for head in needed for _ in range(repeats)]


def test_each_query_attends_to_its_own_head_for_any_number_of_heads_and_ranks():
    unequal = 0
    for heads, key_value_heads, ranks in SPLIT_HEADS:
        for rank in range(ranks):
            served = sharding.head_of_query(heads, key_value_heads, rank * (heads // ranks), heads // ranks)
            assert attended(served) == served, (heads, key_value_heads, ranks)
            unequal += not sharding.serves_equally(served)
    assert 0 < unequal < len(SPLIT_HEADS)


def test_6_queries_of_3_heads_over_2_ranks_are_served_unequally():
    assert [sharding.head_of_query(6, 3, first, 3) for first in (0, 3)] == [[0, 0, 1], [1, 2, 2]]
    assert not sharding.serves_equally([0, 0, 1]) and not sharding.serves_equally([1, 2, 2])


_REGISTRATIONS = {
    "forward": lambda layer, note: layer.register_forward_hook(note),
    "forward_pre": lambda layer, note: layer.register_forward_pre_hook(note),
    "full_backward": lambda layer, note: layer.register_full_backward_hook(note),
    "full_backward_pre": lambda layer, note: layer.register_full_backward_pre_hook(note),
    "all_modules": lambda layer, note: register_module_forward_hook(note),
}


@pytest.mark.parametrize("kind", _REGISTRATIONS)
def test_a_layer_runs_hooks_that_are_registered(kind):
    layer = Layer(LayerNormSpec(8, 1e-5), ShardedWeights(Context(Grid.single_device(), torch.float32)))
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    calls = []
    handle = _REGISTRATIONS[kind](layer, lambda *_: calls.append(kind))
    x = torch.randn(3, 8, requires_grad=True)
    layer(x)[1].sum().backward()
    handle.remove()
    assert calls == [kind]
    layer(x)
    assert calls == [kind]


class Twins:
    """An axis of two ranks with equal tensors."""

    size = 2

    def all_gather(self, shard, parameter=None):
        return torch.cat((shard, shard))

    def all_reduce(self, tensor, parameter=None):
        return tensor.mul_(2)


@pytest.fixture
def weights():
    return ShardedWeights(Context(Grid.single_device(), torch.bfloat16))


def rows(*shape, seed=0):
    return normal(*shape, WIDTH, seed=seed).bfloat16()


def compare(weights, layer, ours, theirs, x):
    """Compare the parameters' gradients with those of float64. Return outputs and gradients of x of both."""
    parameters, wholes = filled(weights, layer)
    leaves = {name: whole.float().double().requires_grad_() for name, whole in wholes.items()}
    wide = x.double().requires_grad_()
    out, expected = ours(x.requires_grad_()), theirs(leaves, wide)
    upstream = normal(*out.shape, seed=1).bfloat16()
    out.backward(upstream)
    weights.schedule.finish()
    expected.backward(upstream.double())
    for name, parameter in parameters.items():
        gradient, exact = parameter.grad, leaves[name].grad
        assert gradient.dtype == torch.float32
        assert (gradient.double() - exact).norm() < 1e-5 * exact.norm()  # rounding to bf16 costs 1e-3
    return (out, x.grad), (expected, wide.grad)


def tokens_of(weights, documents=None):
    return TokenIndex(torch.arange(TOKENS[0]), TOKENS[1], weights.context.grid.axis(None), documents)


def test_weight_and_bias_of_a_linear_layer(weights):
    layer = Layer(LinearSpec(WIDTH, WIDTH), weights)
    compare(weights, layer, lambda x: run_alone(layer(x)), lambda p, x: x @ p["weight"] + p["bias"], rows(*TOKENS))


def test_a_tied_table_in_the_head_and_in_the_lookup(weights):
    table, head = Layer(TokenEmbeddingSpec(WIDTH, WIDTH), weights), Layer(TiedHeadSpec(), weights)
    compare(weights, table, lambda x: run_alone(head(x, table.weight)), lambda p, x: x @ p["weight"].T, rows(*TOKENS))
    table = Layer(TokenEmbeddingSpec(20, WIDTH), weights)
    ids, tokens = torch.randint(20, TOKENS, generator=torch.Generator().manual_seed(3)), tokens_of(weights)

    def plain(parameters, x):
        return x + F.embedding(ids.flatten(), parameters["weight"])

    compare(weights, table, lambda x: x + table(ids, tokens), plain, rows(ids.numel()))


@pytest.mark.parametrize("documents", [None, Documents.ending_with(1, torch.zeros(TOKENS))], ids=["plain", "documents"])
def test_a_position_table(weights, documents):
    table = Layer(PositionEmbeddingSpec(40, WIDTH), weights)
    tokens = tokens_of(weights, documents)

    def plain(parameters, x):
        return x + parameters["weight"][: TOKENS[1]].repeat(TOKENS[0], 1)

    compare(weights, table, lambda x: table(x, tokens), plain, rows(TOKENS[0] * TOKENS[1]))


@pytest.mark.parametrize("split", [False, True], ids=["whole features", "split features"])
def test_weight_and_bias_of_a_norm_and_its_output(weights, split):
    layer = Layer(LayerNormSpec(WIDTH), weights)

    def ours(x):
        arguments = layer.weight, layer.bias, Twins(), layer.spec.epsilon
        return (LayerNormFunction.apply(x, None, *arguments) if split else layer(x))[1]

    def plain(parameters, x):
        return F.layer_norm(x, (WIDTH,), *parameters.values())

    for one, other in zip(*compare(weights, layer, ours, plain, rows(*TOKENS)), strict=True):
        assert split or (one.dtype == torch.bfloat16 and (one - other).norm() < 4e-3 * other.norm())


def test_weight_and_bias_of_a_convolution_and_of_a_group_norm(weights):
    conv = Layer(Conv2dSpec(WIDTH, WIDTH, 3, padding=1), weights)
    norm = Layer(GroupNormSpec(4, (WIDTH,)), weights)

    def plain_conv(parameters, x):
        return F.conv2d(x.movedim(-1, 1), parameters["weight"], parameters["bias"], padding=1).movedim(1, -1)

    def plain_norm(parameters, x):
        return F.group_norm(x.movedim(-1, 1), 4, parameters["weight"], parameters["bias"]).movedim(1, -1)

    compare(weights, conv, lambda x: run_alone(conv(x)), plain_conv, rows(8, 16, 16))
    compare(weights, norm, norm, plain_norm, rows(8, 16, 16))
