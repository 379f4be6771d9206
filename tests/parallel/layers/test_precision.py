"""With bf16 activations, parameter gradients are sums in float32: no partial sum is rounded to bf16."""

import pytest
import torch
import torch.nn.functional as F

from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec, TokenEmbeddingSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec, TiedHeadSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import LayerNormFunction, LayerNormSpec
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.sharded_weights import ShardedWeights

FEATURES, TOKENS = 16, (8, 32)
IDS = torch.randint(20, TOKENS, generator=torch.Generator().manual_seed(3))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(gradient, exact):
    assert gradient.dtype == torch.float32
    assert (gradient.double() - exact).norm() < 1e-5 * exact.norm()  # rounding to bf16 costs 1e-3


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


@pytest.fixture
def x():
    return normal(*TOKENS, FEATURES).bfloat16().requires_grad_()


@pytest.fixture
def upstream():
    return normal(*TOKENS, FEATURES, seed=1).bfloat16()


def test_weight_and_bias_of_a_linear_layer(weights, x, upstream):
    layer = Layer(LinearSpec(FEATURES, FEATURES), weights)
    run_alone(layer(x)).backward(upstream)
    weights.finish()
    wide, d_out = x.detach().double().flatten(0, 1), upstream.double().flatten(0, 1)
    close(layer.weight.grad, wide.t() @ d_out)
    close(layer.bias.grad, d_out.sum(0))


def test_a_tied_table_in_the_head_and_in_the_lookup(weights, x, upstream):
    table = Layer(TokenEmbeddingSpec(FEATURES, FEATURES), weights)
    run_alone(Layer(TiedHeadSpec(), weights)(x, table.weight)).backward(upstream)
    weights.finish()
    close(table.weight.grad, upstream.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1))
    table = Layer(TokenEmbeddingSpec(20, FEATURES), weights)
    table(IDS, TokenIndex(torch.arange(TOKENS[0]), TOKENS[1], weights.context.grid.axis(None))).backward(
        upstream.flatten(0, 1)
    )
    weights.finish()
    close(table.weight.grad, F.one_hot(IDS.flatten(), 20).double().t() @ upstream.double().flatten(0, 1))


@pytest.mark.parametrize("documents", [None, Documents.ending_with(1, torch.zeros(TOKENS))], ids=["plain", "documents"])
def test_a_position_table(weights, upstream, documents):
    table = Layer(PositionEmbeddingSpec(40, FEATURES), weights)
    tokens, x = (
        TokenIndex(torch.arange(TOKENS[0]), TOKENS[1], weights.context.grid.axis(None), documents),
        upstream.flatten(0, 1),
    )
    table(x, tokens).backward(x)
    close(table.weight.grad, F.pad(upstream.double().sum(0), (0, 0, 0, 8)))


@pytest.mark.parametrize("split", [False, True], ids=["whole features", "split features"])
def test_weight_and_bias_of_a_norm(weights, x, upstream, split):
    layer = Layer(LayerNormSpec(FEATURES), weights)
    with torch.no_grad():
        layer.weight.copy_(normal(FEATURES, seed=2)), layer.bias.zero_()
    arguments = layer.weight, layer.bias, Twins(), layer.spec.epsilon
    _, out = LayerNormFunction.apply(x, None, *arguments) if split else layer(x)
    out.backward(upstream)
    exact = F.layer_norm(x.detach().double(), (FEATURES,)) * upstream.double()
    close(layer.weight.grad, exact.sum((0, 1)))
    close(layer.bias.grad, upstream.double().sum((0, 1)))


def test_a_norm_of_bf16_features_is_that_of_their_values(weights, x, upstream):
    layer = Layer(LayerNormSpec(FEATURES), weights)
    with torch.no_grad():
        layer.weight.copy_(normal(FEATURES, seed=2)), layer.bias.copy_(normal(FEATURES, seed=3))
    _, out = layer(x)
    out.backward(upstream)
    wide = x.detach().double().requires_grad_()
    expected = F.layer_norm(wide, (FEATURES,), layer.weight.double(), layer.bias.double())
    expected.backward(upstream.double())
    for ours, theirs in ((out, expected), (x.grad, wide.grad)):
        assert ours.dtype == torch.bfloat16 and (ours - theirs).norm() < 4e-3 * theirs.norm()


def test_weight_and_bias_of_a_convolution_and_of_a_group_norm(weights):
    pixels = (8, 16, 16, FEATURES)
    x, upstream = normal(*pixels).bfloat16().requires_grad_(), normal(*pixels, seed=1).bfloat16()
    conv = Layer(Conv2dSpec(FEATURES, FEATURES, 3, padding=1), weights)
    with torch.no_grad():
        conv.weight.zero_(), conv.bias.zero_()
    run_alone(conv(x)).backward(upstream)
    weights.finish()
    wide, d_out = x.detach().double(), upstream.double()
    weight = torch.zeros(FEATURES, FEATURES, 3, 3, dtype=torch.float64, requires_grad=True)
    (F.conv2d(wide.movedim(-1, 1), weight, padding=1) * d_out.movedim(-1, 1)).sum().backward()
    close(conv.weight.grad, weight.grad)
    close(conv.bias.grad, d_out.sum((0, 1, 2)))
    norm = Layer(GroupNormSpec(4, (FEATURES,)), weights)
    with torch.no_grad():
        norm.weight.fill_(1), norm.bias.zero_()
    norm(x).backward(upstream)
    exact = F.group_norm(wide.movedim(-1, 1), 4).movedim(1, -1) * d_out
    close(norm.weight.grad, exact.sum((0, 1, 2)))
    close(norm.bias.grad, d_out.sum((0, 1, 2)))
