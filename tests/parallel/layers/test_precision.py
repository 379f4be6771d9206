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
from tests.parallel.layers.oracle import filled, normal

FEATURES, TOKENS = 16, (8, 32)


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
    return normal(*shape, FEATURES, seed=seed).bfloat16()


def check(weights, layer, ours, theirs, x):
    """Compare the parameters' gradients with those of float64. Return outputs and gradients of x of both."""
    parameters, wholes = filled(weights, layer)
    leaves = {name: whole.float().double().requires_grad_() for name, whole in wholes.items()}
    wide = x.double().requires_grad_()
    out, expected = ours(x.requires_grad_()), theirs(leaves, wide)
    upstream = normal(*out.shape, seed=1).bfloat16()
    out.backward(upstream)
    weights.finish()
    expected.backward(upstream.double())
    for name, parameter in parameters.items():
        gradient, exact = parameter.grad, leaves[name].grad
        assert gradient.dtype == torch.float32
        assert (gradient.double() - exact).norm() < 1e-5 * exact.norm()  # rounding to bf16 costs 1e-3
    return (out, x.grad), (expected, wide.grad)


def tokens_of(weights, documents=None):
    return TokenIndex(torch.arange(TOKENS[0]), TOKENS[1], weights.context.grid.axis(None), documents)


def test_weight_and_bias_of_a_linear_layer(weights):
    layer = Layer(LinearSpec(FEATURES, FEATURES), weights)
    check(weights, layer, lambda x: run_alone(layer(x)), lambda p, x: x @ p["weight"] + p["bias"], rows(*TOKENS))


def test_a_tied_table_in_the_head_and_in_the_lookup(weights):
    table, head = Layer(TokenEmbeddingSpec(FEATURES, FEATURES), weights), Layer(TiedHeadSpec(), weights)
    check(weights, table, lambda x: run_alone(head(x, table.weight)), lambda p, x: x @ p["weight"].T, rows(*TOKENS))
    table = Layer(TokenEmbeddingSpec(20, FEATURES), weights)
    ids, tokens = torch.randint(20, TOKENS, generator=torch.Generator().manual_seed(3)), tokens_of(weights)

    def plain(parameters, x):
        return x + F.embedding(ids.flatten(), parameters["weight"])

    check(weights, table, lambda x: x + table(ids, tokens), plain, rows(ids.numel()))


@pytest.mark.parametrize("documents", [None, Documents.ending_with(1, torch.zeros(TOKENS))], ids=["plain", "documents"])
def test_a_position_table(weights, documents):
    table = Layer(PositionEmbeddingSpec(40, FEATURES), weights)
    tokens = tokens_of(weights, documents)

    def plain(parameters, x):
        return x + parameters["weight"][: TOKENS[1]].repeat(TOKENS[0], 1)

    check(weights, table, lambda x: table(x, tokens), plain, rows(TOKENS[0] * TOKENS[1]))


@pytest.mark.parametrize("split", [False, True], ids=["whole features", "split features"])
def test_weight_and_bias_of_a_norm_and_its_output(weights, split):
    layer = Layer(LayerNormSpec(FEATURES), weights)

    def ours(x):
        arguments = layer.weight, layer.bias, Twins(), layer.spec.epsilon
        return (LayerNormFunction.apply(x, None, *arguments) if split else layer(x))[1]

    def plain(parameters, x):
        return F.layer_norm(x, (FEATURES,), *parameters.values())

    for one, other in zip(*check(weights, layer, ours, plain, rows(*TOKENS)), strict=True):
        assert split or (one.dtype == torch.bfloat16 and (one - other).norm() < 4e-3 * other.norm())


def test_weight_and_bias_of_a_convolution_and_of_a_group_norm(weights):
    conv = Layer(Conv2dSpec(FEATURES, FEATURES, 3, padding=1), weights)
    norm = Layer(GroupNormSpec(4, (FEATURES,)), weights)

    def plain_conv(parameters, x):
        return F.conv2d(x.movedim(-1, 1), parameters["weight"], parameters["bias"], padding=1).movedim(1, -1)

    def plain_norm(parameters, x):
        return F.group_norm(x.movedim(-1, 1), 4, parameters["weight"], parameters["bias"]).movedim(1, -1)

    check(weights, conv, lambda x: run_alone(conv(x)), plain_conv, rows(8, 16, 16))
    check(weights, norm, norm, plain_norm, rows(8, 16, 16))
