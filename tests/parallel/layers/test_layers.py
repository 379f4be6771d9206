"""Each layer against plain torch in float64, alone, on the grids whose axes it uses."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpt4d.config import GridSizes
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.activations import gelu_of_biased
from gpt4d.parallel.layers.embedding import TokenEmbeddingSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import AllHeadsNormSpec, BranchNormSpec, LayerNormSpec, RMSNormSpec
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.symbolic import kernels
from tests.parallel.layers.oracle import check_cases, close, fill, normal, part, weights_on
from tests.support.grids import batch_part, grid_name


def linear(sizes, transposed, parts):
    weights = weights_on(sizes)
    layer = Layer(LinearSpec(8, 12, transposed=transposed, num_fused=parts), weights)
    total = GradientReducer(weights, dict(layer.named_parameters()))
    inputs, weight = normal(8, 3, 8), normal(8, (parts or 1) * 12, seed=1)
    bias, upstream = normal((parts or 1) * 12, seed=2), normal(8, 3, (parts or 1) * 12, seed=3)
    fill(layer.weight, weight, weights)
    fill(layer.bias, bias, weights)
    into, out = ("x", "y") if transposed else ("y", "x")
    batch = ("data", "z")
    out_dims = ((out,),) if parts is None else ((), (out,))
    out_layout = Layout(batch, (), *out_dims)
    out_shape = (8, 3, *layer.bias.spec.shape)
    mine = part(inputs, weights, Layout(batch, (), (into,))).requires_grad_()
    ours = run_alone(layer(mine))
    ours.backward(part(upstream.view(out_shape), weights, out_layout))

    inputs, weight, bias = (t.requires_grad_() for t in (inputs, weight, bias))
    theirs = inputs @ weight + bias
    theirs.backward(upstream)
    close(ours, part(theirs.view(out_shape), weights, out_layout))
    close(mine.grad, part(inputs.grad, weights, Layout(batch, (), (into,))))
    # Sharded weights reduce-scatter their gradients over z. The reducer handles the remaining axes.
    total.finish()
    for parameter, whole in ((layer.weight, weight), (layer.bias, bias)):
        close(parameter.grad, part(whole.grad.view(parameter.spec.shape), weights, parameter.spec.layout))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 1), (4, 2, 1, 1), (1, 2, 2, 2)], ids=str)
def test_a_linear_layer_is_algorithm_1(ranks, sizes):
    sizes, cases = GridSizes(*sizes), itertools.product((False, True), (None, 3))  # transposed, parts
    ranks.run(sizes.devices, check_cases, linear, sizes, list(cases))


def layer_norm(sizes, offset):
    weights = weights_on(sizes)
    layer = Layer(LayerNormSpec(12), weights)
    inputs, weight, bias, upstream = normal(4, 3, 12) + offset, normal(12, seed=1), normal(12, seed=2), normal(4, 3, 12)
    fill(layer.weight, weight, weights)
    fill(layer.bias, bias, weights)
    layout = Layout((), (), ("y",))
    mine = part(inputs, weights, layout).requires_grad_()
    _, ours = layer(mine)
    ours.backward(part(upstream, weights, layout))
    inputs, weight, bias = (t.requires_grad_() for t in (inputs, weight, bias))
    theirs = F.layer_norm(inputs, (12,), weight, bias, 1e-5)
    theirs.backward(upstream)
    bound = 1e-13 * (1 + offset)
    for one, other in (
        (ours, part(theirs, weights, layout)),
        (mine.grad, part(inputs.grad, weights, layout)),
        (layer.weight.grad, part(weight.grad, weights, Layout(("y",)))),
        (layer.bias.grad, part(bias.grad, weights, Layout(("y",)))),
    ):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("sizes", [GridSizes(1, 1), GridSizes(1, 3), GridSizes(2, 4)], ids=grid_name)
def test_layer_norm_takes_mean_and_variance_of_all_features(ranks, sizes):
    """The case with an offset fails if a difference of large squares loses digits."""
    ranks.run(sizes.devices, check_cases, layer_norm, sizes, [(0.0,), (1000.0,)])


def norm_of_stream(sizes, kind, added):
    weights, layout = weights_on(sizes), Layout((), (), ("y",))
    layer = Layer(kind(12), weights)
    leaves = [normal(4, 3, 12, seed=1), normal(4, 3, 12, seed=2)][: 1 + added]
    upstream = [normal(4, 3, 12, seed=3), normal(4, 3, 12, seed=4)]
    fill(layer.weight, weight := normal(12, seed=5), weights)
    if kind is LayerNormSpec:
        fill(layer.bias, torch.zeros(12), weights)
    mine = [part(x, weights, layout).clone().requires_grad_() for x in leaves]
    ours = layer(*mine)
    torch.autograd.backward(ours, [part(x, weights, layout) for x in upstream])
    leaves, weight = [x.requires_grad_() for x in leaves], weight.requires_grad_()
    whole = sum(leaves)
    plain = F.layer_norm(whole, (12,), weight) if kind is LayerNormSpec else F.rms_norm(whole, (12,), weight, 1e-5)
    torch.autograd.backward((whole, plain), upstream)
    close(ours[0], part(whole, weights, layout))
    close(ours[1], part(plain, weights, layout))
    for x, theirs in zip(mine, leaves, strict=True):
        close(x.grad, part(theirs.grad, weights, layout))
    close(layer.weight.grad, part(weight.grad, weights, Layout(("y",))))


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(1, 2)], ids=grid_name)
def test_a_norm_adds_a_branch_to_the_stream_and_the_gradients_of_both(ranks, sizes):
    cases = itertools.product((LayerNormSpec, RMSNormSpec), (False, True))  # kind, whether a branch is added
    ranks.run(sizes.devices, check_cases, norm_of_stream, sizes, list(cases))


def norm_of_all_heads(sizes, scatter):
    weights = weights_on(sizes, scatter_heads=scatter)
    layer, layout = Layer(AllHeadsNormSpec(24, 12), weights), Layout((), (), weights.context.head_axes(12))
    x, weight, upstream = normal(4, 3, 24), normal(24, seed=1), normal(4, 3, 24, seed=2)
    fill(layer.weight, weight, weights)
    mine = part(x, weights, layout).clone().requires_grad_()
    ours = layer(mine)
    ours.backward(part(upstream, weights, layout))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    theirs = F.rms_norm(x, (24,), weight, 1e-5)
    theirs.backward(upstream)
    close(ours, part(theirs, weights, layout))
    close(mine.grad, part(x.grad, weights, layout))
    gradient = layer.weight.grad
    for axis in weights.context.batch_axes(layer.weight.spec):  # as the gradient reducer does
        gradient = weights.context.grid[axis].all_reduce(gradient)
    close(gradient, weight.grad)


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(3), GridSizes(2, 2), GridSizes(2, 3)], ids=grid_name)
def test_a_norm_of_all_heads_is_one_norm_on_every_grid(ranks, sizes):
    ranks.run(sizes.devices, check_cases, norm_of_all_heads, sizes, [(False,), (True,)])


@pytest.mark.parametrize("recomputes_inputs", [False, True])
def test_a_norm_behind_a_branch_is_added_to_the_stream(ranks, recomputes_inputs):
    ranks.run(2, norm_behind_a_branch, recomputes_inputs)


def norm_behind_a_branch(recomputes_inputs):
    weights, layout = weights_on(GridSizes(1, 2), recompute_inputs=recomputes_inputs), Layout((), (), ("y",))
    layer = Layer(BranchNormSpec(12), weights)
    leaves, upstream = [normal(4, 3, 12), normal(4, 3, 12, seed=1)], normal(4, 3, 12, seed=2)
    fill(layer.weight, weight := normal(12, seed=3), weights)
    mine = [part(x, weights, layout).clone().requires_grad_() for x in leaves]
    ours = layer(*mine)
    ours.backward(part(upstream, weights, layout))
    (x, branch), weight = [x.requires_grad_() for x in leaves], weight.requires_grad_()
    theirs = x + F.rms_norm(branch, (12,), weight, 1e-5)
    theirs.backward(upstream)
    close(ours, part(theirs, weights, layout))
    for one, other in zip(mine, leaves, strict=True):
        close(one.grad, part(other.grad, weights, layout))
    close(layer.weight.grad, part(weight.grad, weights, Layout(("y",))))


@pytest.mark.parametrize("tokens", [256, 192], ids=["two blocks", "one block"])
def test_gelu_computes_the_gradient_of_the_bias_in_its_input(tokens):
    product, bias, upstream = normal(tokens, 6), normal(2, 3, seed=1).requires_grad_(), normal(tokens, 6, seed=2)
    x = (product + bias.detach().flatten()).requires_grad_()
    ours = gelu_of_biased(x, bias)
    ours.backward(upstream)
    found, bias.grad = bias.grad, None
    wide = product.requires_grad_()
    theirs = F.gelu(wide + bias.flatten(), approximate="tanh")
    theirs.backward(upstream)
    close(ours, theirs)
    close(x.grad, wide.grad)
    close(found, bias.grad)


def token_embedding(sizes):
    weights = weights_on(sizes)
    layer = Layer(TokenEmbeddingSpec(24, 8), weights)
    table = normal(24, 8)
    ids = torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(0))
    upstream = normal(4, 6, 8, seed=1)
    fill(layer.weight, table, weights)
    ids_here = batch_part(ids, weights.context.grid)
    rows = layer(ids_here, TokenIndex(torch.arange(len(ids_here)), 6, weights.context.grid.axis(None))).unflatten(
        0, (-1, 6)
    )
    layout = Layout(("data", "z"), (), ("y",))
    rows.backward(part(upstream, weights, layout))
    weights.finish()
    table.requires_grad_()
    F.embedding(ids, table).backward(upstream)
    close(rows, part(F.embedding(ids, table), weights, layout))
    close(layer.weight.grad, part(table.grad, weights, layer.weight.spec.layout))


@pytest.mark.parametrize("sizes", [GridSizes(1, 1, 1), GridSizes(2, 2, 2), GridSizes(3, 1, 2)], ids=grid_name)
def test_a_vocabulary_parallel_embedding_equals_an_unsharded_one(ranks, sizes):
    ranks.run(sizes.devices, token_embedding, sizes)


def cross_entropy(sizes, columns, vocabulary, scale, ignored=0, z_loss=0.0):
    weights = weights_on(sizes)
    logits = normal(5, 7, columns) * scale
    targets = torch.randint(0, vocabulary, (5, 7), generator=torch.Generator().manual_seed(1))
    targets.flatten()[:ignored] = -1
    logits[..., vocabulary:] = 1e4  # padding, which must not take part: it exceeds everything else
    layout = Layout((), (), ("x",))
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
def test_cross_entropy_over_a_cut_vocabulary_leaves_padding_out(ranks, sizes):
    """A vocabulary of 9 in 16 columns: the third of four ranks has one token, the last rank has none."""
    ranks.run(sizes.devices, check_cases, cross_entropy, sizes, [(16, 9, 1.0), (16, 9, 300.0)])


@pytest.mark.parametrize("sizes", [GridSizes(1), GridSizes(4)], ids=grid_name)
def test_cross_entropy_ignores_negative_targets_even_if_all_are(ranks, sizes):
    ranks.run(sizes.devices, check_cases, cross_entropy, sizes, [(16, 9, 300.0, 20), (16, 9, 1.0, 35)])


@pytest.mark.parametrize("sizes", [GridSizes(1), GridSizes(4)], ids=grid_name)
def test_the_z_loss_changes_only_gradients(ranks, sizes):
    ranks.run(sizes.devices, check_cases, cross_entropy, sizes, [(16, 9, 5.0, 0, 0.1), (16, 9, 300.0, 20, 0.01)])


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


def accumulate(sizes):
    weights = weights_on(sizes)
    layer = Layer(LinearSpec(8, 8), weights)
    fill(layer.weight, normal(8, 8), weights)
    fill(layer.bias, normal(8), weights)
    inputs = torch.ones(2, 8 // sizes.y, dtype=torch.float64)
    run_alone(layer(inputs)).sum().backward()
    weights.finish()
    once = layer.weight.grad.clone()
    run_alone(layer(inputs)).sum().backward()
    weights.finish()
    close(layer.weight.grad, 2 * once)


def test_gradients_of_microbatches_add_up(ranks):
    ranks.run(4, accumulate, GridSizes(1, 2, 2))
