"""Functions and layers on symbolic tensors have the results, gradients, saved tensors and costs of torch's tensors."""

import math
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from typing_extensions import get_protocol_members

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.pending import MeshAxis
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import join, run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers import activations, attention, conv, heads, loss
from gpt4d.parallel.layers.attention import AttentionSpec, FusedAttentionSpec
from gpt4d.parallel.layers.linear import LinearSpec, concatenate, separate
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.symbolic.stage import SymbolicAxis, SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor, backward, leaf
from tests.parallel.counting_device import CountedOperations, CountingDevice

B, S, H, SIZE = 2, 6, 4, 8  # of attention
SAMPLES, SIDE, C = 3, 4, 24  # of images
HEADS, IMAGE = (B, S, H, SIZE), (SAMPLES, SIDE, SIDE, C)


def kind(tensor) -> tuple:
    """Return the shape and the dtype of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def in_torch(function, shapes, dtype=torch.float32) -> tuple[list, list, Counter]:
    """Return the kinds of the results and of the gradients of the inputs, and the sizes of the saved tensors."""
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    saved: Counter = Counter()

    def save(tensor):
        saved[tensor.numel(), kind(tensor)[1]] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = function(*[leaf.view_as(leaf) for leaf in leaves])
    results = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return [kind(result) for result in results], [kind(leaf.grad) for leaf in leaves], saved


def saved_by(nodes: set) -> Counter:
    """Return the tensors that these nodes and the nodes before them save."""
    found: Counter = Counter()
    reached, waiting = set(nodes), list(nodes)
    while waiting:
        node = waiting.pop()
        found.update((math.prod(tensor.shape), tensor.dtype) for tensor in node.saved_tensors)
        before = {edge[0] for edge in node.edges if edge} - reached
        reached |= before
        waiting += before
    return found


def in_symbols(device, function, shapes, dtype=torch.float32) -> tuple[list, list, Counter]:
    """Return the same as ``in_torch``."""
    gradients: dict[int, SymbolicTensor] = {}
    leaves = [
        leaf(device, shape, kind(torch.empty(0, dtype=dtype))[1], lambda d, i=i: gradients.setdefault(i, d))
        for i, shape in enumerate(shapes)
    ]
    out = function(*leaves)
    results = out if isinstance(out, tuple) else (out,)
    saved = saved_by({result.grad_fn for result in results})
    kinds = [kind(result) for result in results]
    backward([(result, result.like().new()) for result in results])
    return kinds, [kind(gradients[i]) for i in range(len(shapes))], saved


def alone(layer):
    """Return the function of a layer."""
    return lambda *inputs: run_alone(layer(*inputs))


def fused_attention(causal=True, window=None, scale=None):
    """Return the function of attention by a fused kernel."""

    def attend(q, k, v):
        mask = attention.window_mask(q, None, None, window) if window else None
        return attention.AttentionFunction.apply(q, k, v, None, mask, causal, window, scale)

    return attend


FUNCTIONS = {
    "fused kernel, causal": (fused_attention(), [HEADS] * 3),
    "fused kernel": (fused_attention(causal=False), [HEADS] * 3),
    "fused kernel, window": (fused_attention(window=2, scale=0.5), [HEADS] * 3),
    "repeated heads": (lambda x: attention.RepeatedHeadsFunction.apply(x, 3), [HEADS]),
    "causal scores": (lambda q, k: attention.ScoresFunction.apply(q, k, None, True), [HEADS] * 2),
    "scores": (lambda q, k: attention.ScoresFunction.apply(q, k, None, False), [HEADS] * 2),
    "scores of one sequence": (lambda q, k: attention.ScoresFunction.apply(q, k, None, True), [(1, S, H, SIZE)] * 2),
    "softmax": (attention.SoftmaxFunction.apply, [(B, H, S, S)]),
    "mixed values": (attention.MixedValuesFunction.apply, [(B, H, S, S), HEADS]),
    "stacked": (heads.StackedFunction.apply, [HEADS] * 2),
    "consecutive heads": (lambda x: heads.ConsecutiveHeadsFunction.apply(x, 1, 3), [HEADS]),
    "selected heads": (lambda x: heads.SelectedHeadsFunction.apply(x, (0, 1, 1)), [HEADS]),
}
COPIES = {
    "silu": (activations.silu, [IMAGE]),
    "join": (join, [(2, C), (3, C)]),
    "concatenation": (lambda *parts: concatenate(parts, (C, 8), 4), [IMAGE, (*IMAGE[:3], 8)]),
    "concatenation of one piece each": (lambda *parts: concatenate(parts, (C, 8), 1), [IMAGE, (*IMAGE[:3], 8)]),
    "separation": (lambda whole: tuple(separate(whole, (12, 6, 6), 3)), [IMAGE]),
    "separation of one piece each": (lambda whole: tuple(separate(whole, (12, 6, 6), 1)), [IMAGE]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, *COPIES])
def test_a_function_has_the_results_gradients_and_saved_tensors_of_torch(name, dtype):
    function, shapes = (FUNCTIONS | COPIES)[name]
    device = CountingDevice()
    assert in_symbols(device, function, shapes, dtype) == in_torch(function, shapes, dtype)
    assert device.held == 0


@pytest.mark.parametrize("name", COPIES)
def test_a_function_reads_and_writes_as_many_bytes_as_torch(name):
    function, shapes = COPIES[name]
    device, inputs = CountingDevice(), [torch.randn(shape).requires_grad_() for shape in shapes]
    in_symbols(device, function, shapes)
    with CountedOperations() as counted:
        out = function(*inputs)
        results = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(results, inputs, [torch.empty_like(result) for result in results])
    assert device.moved == pytest.approx(counted.moved)


def test_torch_and_symbolic_tensors_and_axes_have_every_member_that_layers_use_on_both():
    device = CountingDevice()
    tensors = torch.empty(1), SymbolicTensor(device, (1,), "float32")
    axes = Axis("x"), SymbolicAxis(device, "x", 1)
    for protocol, values in ((Tensor, tensors), (MeshAxis, axes)):
        members = get_protocol_members(protocol)
        assert members >= ({"shape", "detach", "__add__"} if protocol is Tensor else {"index", "start_all_gather"})
        assert not [(value, name) for value in values for name in members if not hasattr(value, name)]


def test_a_separation_of_one_piece_each_shares_the_memory():
    device = CountingDevice()
    whole = SymbolicTensor(device, (2, C), "float32").new()
    parts = separate(whole, (12, 6, 6), 1)
    assert device.held == whole.nbytes
    parts += separate(whole, (12, 6, 6), 3)
    assert device.held == 2 * whole.nbytes


@pytest.mark.parametrize(("window", "causal", "share"), [(None, True, 0.5), (None, False, 1), (2, True, 1)])
def test_kernels_of_attention_execute_half_of_the_products_with_a_causal_mask_and_all_with_another(
    window, causal, share
):
    device = CountingDevice()
    in_symbols(device, fused_attention(causal, window), [HEADS] * 3)
    product = 2 * B * H * S * S * SIZE
    assert device.flops == 7 * product and device.events == [share * n * product for n in (2, 5)]


def weights_of(dtype, **options) -> ShardedWeights:
    return ShardedWeights(Context(Grid.single_device(), dtype), **options)


def with_tokens(layer, ids):
    """Return the function of a layer of attention."""
    return lambda *x: run_alone(layer(*x, TokenIndex(ids, S, Grid.single_device().axis(None))))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_fused_queries_keys_and_values(causal, dropout):
    layer = Layer(FusedAttentionSpec(H, dropout, causal), weights_of(torch.float32))
    device, shapes = CountingDevice(), [(B * S, 3, H * SIZE)]
    found = in_symbols(device, with_tokens(layer, SymbolicTensor(device, (B,), "int64")), shapes)
    assert found == in_torch(with_tokens(layer, torch.arange(B)), shapes)
    assert device.flops == (6 if dropout else 7) * 2 * B * S * S * H * SIZE
    assert device.held == 0


class FlashAttention:
    """A stand-in for the kernel that torch chooses on a GPU, for tensors without values."""

    @staticmethod
    def scaled_dot_product_attention(q, k, v, mask, is_causal, scale, enable_gqa):
        assert mask is None and enable_gqa == (k.shape[1] < q.shape[1])
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal, scale=scale)[0]


def test_a_gpu_saves_keys_and_values_once_for_all_queries_that_they_serve():
    layer = Layer(AttentionSpec(H), weights_of(torch.bfloat16, device="meta"))
    device, shapes = CountingDevice(), [HEADS, (B, S, 1, SIZE), (B, S, 1, SIZE)]
    with patch.object(attention, "F", FlashAttention), torch.device("meta"):
        expected = in_torch(with_tokens(layer, torch.arange(B)), shapes, torch.bfloat16)
    found = in_symbols(device, with_tokens(layer, SymbolicTensor(device, (B,), "int64")), shapes, torch.bfloat16)
    assert found[:2] == expected[:2]
    size = math.prod(shapes[1])
    assert found[2][size, "bfloat16"] == expected[2][size, "bfloat16"] == 2
    assert found[2][4 * size, "bfloat16"] == expected[2][4 * size, "bfloat16"] == 2  # queries and output
    assert device.held == 0


@pytest.mark.parametrize(
    ("dtype", "size", "mask"), [("float32", SIZE, None), ("bfloat16", 12, None), ("bfloat16", SIZE, "mask")], ids=str
)
def test_a_gpu_repeats_heads_for_kernels_that_need_as_many(dtype, size, mask):
    assert not attention.groups_heads(SymbolicTensor(CountingDevice(), (B, S, H, size), dtype), mask)


def test_tokens():
    device = CountingDevice()
    values = SymbolicTensor(device, (4, S), "int64"), torch.zeros(4, S, dtype=torch.int64)
    ids = SymbolicTensor(device, (4,), "int64"), torch.arange(4)
    ours, theirs = (TokenIndex(each, S, SimpleNamespace(size=2, index=1), num_chunks=2) for each in ids)
    for one, other in [(ours, theirs), *zip(ours.chunk(2), theirs.chunk(2), strict=True)]:
        for attribute in ("sample_ids", "samples", "places", "positions"):
            assert kind(getattr(one, attribute)) == kind(getattr(other, attribute))
    for name in ("local", "gathered"):
        one, other = (getattr(each, name)(value) for each, value in zip((ours, theirs), values, strict=True))
        assert kind(one) == kind(other)


def symbolic_layer(spec, device) -> SymbolicLayer:
    """Return the layer of a spec on symbolic tensors."""
    context = Context(SymbolicGrid(device, GridSizes()), "float32")
    return SymbolicLayer(spec, SymbolicWeights(context, spec.all_parameters, gradient_bytes=1 << 20))


def test_an_enlarged_input_takes_time_in_every_product():
    moved = {}
    for factor in (1, 2):
        device = CountingDevice()
        layer = symbolic_layer(conv.Conv2dSpec(C, 8, 1, upsampling=factor, stride=factor, bias=False), device)
        in_symbols(device, alone(layer), [IMAGE])
        moved[factor] = device.moved
    small = 4 * math.prod(IMAGE)
    large = 4 * small
    # Each product reads or writes the large tensor instead of the small one, which is converted in a further kernel.
    assert moved[2] - moved[1] == 3 * (large - small) + 3 * (large + small)


@pytest.mark.parametrize(("num_chunks", "masked"), [(1, False), (2, False), (2, True)])
def test_a_head_loss(num_chunks, masked):
    tokens, hidden, vocabulary = 6, 8, 10
    device, spec = CountingDevice(), LinearSpec(hidden, vocabulary, bias=False)
    symbolic, layer = symbolic_layer(spec, device), Layer(spec, weights_of(torch.float32))
    nn.init.normal_(layer.weight)

    def loss_of(layer, targets):
        rest = num_chunks, masked
        return lambda x: loss.head_loss(x, layer.weight, targets, vocabulary, layer.product, layer.current_pass, *rest)

    compute = loss_of(symbolic, SymbolicTensor(device, (tokens,), "int64"))
    found = in_symbols(device, compute, [(tokens, hidden)])
    assert found[:2] == in_torch(loss_of(layer, torch.arange(tokens)), [(tokens, hidden)])[:2]
    assert kind(symbolic.weights.gradients["weight"]) == kind(layer.weight.grad)
    assert device.flops == 3 * 2 * tokens * hidden * vocabulary
    device.records = False
    compute(SymbolicTensor(device, (tokens, hidden), "float32").new())
    assert device.flops == 4 * 2 * tokens * hidden * vocabulary
