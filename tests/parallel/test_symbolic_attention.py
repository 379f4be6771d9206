"""The functions of attention, grouped heads and tokens on symbolic tensors, against torch's tensors."""

import math
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import attention, attention_kernels, heads
from gpt4d.parallel.layers.attention import AttentionSpec, FusedAttentionSpec
from gpt4d.parallel.layers.heads import KeyValueHeadsSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.symbolic import tape
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from tests.parallel.counting_device import CountingDevice

B, S, H, SIZE = 2, 6, 4, 8


def kind(tensor) -> tuple:
    """Return the shape and the dtype of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def in_torch(function, shapes, dtype) -> tuple[list, list, Counter]:
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


def in_symbols(device, function, shapes, dtype) -> tuple[list, list, Counter]:
    """Return the same as ``in_torch``."""
    gradients: dict[int, SymbolicTensor] = {}
    leaves = [
        tape.leaf(device, shape, kind(torch.empty(0, dtype=dtype))[1], lambda d, i=i: gradients.setdefault(i, d))
        for i, shape in enumerate(shapes)
    ]
    out = function(*leaves)
    results = out if isinstance(out, tuple) else (out,)
    saved = saved_by({result.grad_fn for result in results})
    kinds = [kind(result) for result in results]
    tape.backward([(result, result.like().new()) for result in results])
    return kinds, [kind(gradients[i]) for i in range(len(shapes))], saved


HEADS = (B, S, H, SIZE)


def attention_in_a_window(q, k, v):
    mask = attention.window_mask(q, None, None, 2)
    return attention.AttentionFunction.apply(q, k, v, None, mask, True, 2, 0.5)


FUNCTIONS = {
    "fused kernel, causal": (lambda q, k, v: attention.AttentionFunction.apply(q, k, v, None, None, True), [HEADS] * 3),
    "fused kernel": (lambda q, k, v: attention.AttentionFunction.apply(q, k, v, None, None, False), [HEADS] * 3),
    "fused kernel, window": (attention_in_a_window, [HEADS] * 3),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_results_gradients_and_saved_tensors_of_torch(name, dtype):
    function, shapes = FUNCTIONS[name]
    device = CountingDevice()
    assert in_symbols(device, function, shapes, dtype) == in_torch(function, shapes, dtype)
    assert device.held == 0


class Twins(SimpleNamespace):
    """An axis of two ranks, of which both have the same values."""

    def __init__(self, index: int = 0):
        super().__init__(size=2, index=index)

    def start_all_gather(self, shard, parameter=None):
        if isinstance(shard, SymbolicTensor):
            return Pending(shard.like((2 * shard.shape[0], *shard.shape[1:])).new())
        return Pending(torch.cat((shard, shard)))

    def start_reduce_scatter(self, full, parameter=None):
        if isinstance(full, SymbolicTensor):
            return Pending(full.like((full.shape[0] // 2, *full.shape[1:])).new())
        return Pending(2 * full.chunk(2)[self.index])


def context_of(axes) -> SimpleNamespace:
    grid = SimpleNamespace(axis=lambda name: axes[name])
    return SimpleNamespace(context=SimpleNamespace(grid=grid, head_axes=lambda heads, stream="y": tuple(axes)))


@pytest.mark.parametrize("key_value_heads", [1, 2, 3, 6], ids=lambda count: f"{count} heads of keys")
def test_heads_of_keys_and_values(key_value_heads):
    spec = KeyValueHeadsSpec(6, key_value_heads, 6)
    shapes = [(B, S, key_value_heads * SIZE // 2)] * 2
    for index in range(2):
        layer = Layer(spec, context_of({"x": Twins(index)}))
        device = CountingDevice()
        found = in_symbols(device, lambda k, v, layer=layer: run_alone(layer(k, v)), shapes, torch.float32)
        assert found == in_torch(lambda k, v, layer=layer: run_alone(layer(k, v)), shapes, torch.float32)
        assert device.held == 0


@pytest.mark.parametrize(("masked", "causal", "share"), [(False, True, 0.5), (False, False, 1), (True, True, 1)])
def test_kernels_of_attention_execute_half_of_the_products_with_a_causal_mask_and_all_with_another(
    masked, causal, share
):
    executed = []

    class Device(CountingDevice):
        def compute(self, computation):
            executed.append((computation.flops, computation.attention))

    def function(q, k, v):
        mask = attention.window_mask(q, None, None, 2) if masked else None
        return attention.AttentionFunction.apply(q, k, v, None, mask, causal, 2 if masked else None)

    in_symbols(Device(), function, [HEADS] * 3, torch.float32)
    product = 2 * B * H * S * S * SIZE
    assert [pair for pair in executed if pair[1]] == [(n * product, share * n * product) for n in (2, 5)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_fused_queries_keys_and_values(causal, dropout):
    layer = Layer(FusedAttentionSpec(H, dropout, causal), ShardedWeights(Context(Grid.single_device(), torch.float32)))
    device, axis, shapes = CountingDevice(), Grid.single_device().axis(None), [(B * S, 3, H * SIZE)]
    symbolic_ids = SymbolicTensor(device, (B,), "int64")
    found = in_symbols(device, lambda x: run_alone(layer(x, TokenIndex(symbolic_ids, S, axis))), shapes, torch.float32)
    assert found == in_torch(lambda x: run_alone(layer(x, TokenIndex(torch.arange(B), S, axis))), shapes, torch.float32)
    product = 2 * B * S * S * H * SIZE
    assert device.flops == (6 if dropout else 7) * product
    assert device.held == 0


class FlashAttention:
    """A stand-in for the kernel that torch chooses on a GPU, for tensors without values."""

    @staticmethod
    def scaled_dot_product_attention(q, k, v, mask, is_causal, scale, enable_gqa):
        assert mask is None and enable_gqa == (k.shape[1] < q.shape[1])
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal, scale=scale)[0]


def test_a_gpu_saves_keys_and_values_once_for_all_queries_that_they_serve():
    weights = ShardedWeights(Context(Grid.single_device(), torch.bfloat16), device="meta")
    layer, axis = Layer(AttentionSpec(H), weights), Grid.single_device().axis(None)
    device, shapes = CountingDevice(), [HEADS, (B, S, 1, SIZE), (B, S, 1, SIZE)]
    ids, symbolic_ids = torch.arange(B, device="meta"), SymbolicTensor(device, (B,), "int64")
    with patch.object(attention_kernels, "F", FlashAttention), torch.device("meta"):
        expected = in_torch(lambda *x: run_alone(layer(*x, TokenIndex(ids, S, axis))), shapes, torch.bfloat16)
    found = in_symbols(
        device, lambda *x: run_alone(layer(*x, TokenIndex(symbolic_ids, S, axis))), shapes, torch.bfloat16
    )
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
    ids = torch.arange(4)
    symbolic_ids, values = SymbolicTensor(device, (4,), "int64"), SymbolicTensor(device, (4, S), "int64")
    ours = TokenIndex(symbolic_ids, S, Twins(1), num_chunks=2)
    theirs = TokenIndex(ids, S, Twins(1), num_chunks=2)
    for one, other in [(ours, theirs), *zip(ours.chunk(2), theirs.chunk(2), strict=True)]:
        for attribute in ("sample_ids", "samples", "places", "positions"):
            assert kind(getattr(one, attribute)) == kind(getattr(other, attribute))
    assert kind(ours.local(values)) == kind(theirs.local(torch.zeros(4, S, dtype=torch.int64)))
    assert kind(ours.gathered(values)) == kind(theirs.gathered(torch.zeros(4, S, dtype=torch.int64)))
