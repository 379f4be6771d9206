"""Concatenations, time embeddings, chunks, products and head losses on symbolic tensors, against torch's tensors."""

import pytest
import torch
from torch import nn

from gpt4d.config import GridSizes
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import join, run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.activations import silu
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.embedding import ScaleShiftSpec, TimeEmbeddingSpec
from gpt4d.parallel.layers.linear import LinearSpec, concatenate, separate
from gpt4d.parallel.layers.loss import head_loss
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.parallel.symbolic import tape
from gpt4d.parallel.symbolic.stage import SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from tests.parallel.counting_device import CountingDevice
from tests.parallel.test_eager_costs import Counter
from tests.parallel.test_symbolic_attention import in_symbols, in_torch, kind


class CommunicatingDevice(CountingDevice):
    """A device that records its collectives."""

    def __init__(self):
        super().__init__()
        self.started = []

    def start(self, kind, axis, nbytes):
        self.started.append((kind, axis, nbytes))

    def wait(self, collective):
        pass


B, SIDE, C = 3, 4, 24
SINGLE = GridSizes()
IMAGE = (B, SIDE, SIDE, C)

FUNCTIONS = {
    "silu": (silu, [IMAGE]),
    "join": (join, [(2, C), (3, C)]),
    "concatenation": (lambda *parts: concatenate(parts, (C, 8), 4), [IMAGE, (*IMAGE[:3], 8)]),
    "concatenation of one piece each": (lambda *parts: concatenate(parts, (C, 8), 1), [IMAGE, (*IMAGE[:3], 8)]),
    "separation": (lambda whole: tuple(separate(whole, (12, 6, 6), 3)), [IMAGE]),
    "separation of one piece each": (lambda whole: tuple(separate(whole, (12, 6, 6), 1)), [IMAGE]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_results_gradients_and_saved_tensors_of_torch(name, dtype):
    function, shapes = FUNCTIONS[name]
    device = CountingDevice()
    assert in_symbols(device, function, shapes, dtype) == in_torch(function, shapes, dtype)
    assert device.held == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_reads_and_writes_as_many_bytes_as_torch(name):
    function, shapes = FUNCTIONS[name]
    device, inputs = CountingDevice(), [torch.randn(shape).requires_grad_() for shape in shapes]
    in_symbols(device, function, shapes, torch.float32)
    with Counter() as counter:
        out = function(*inputs)
        results = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(results, inputs, [torch.empty_like(result) for result in results])
    assert device.moved == pytest.approx(counter.moved)


def test_a_separation_of_one_piece_each_shares_the_memory():
    device = CountingDevice()
    whole = SymbolicTensor(device, (2, C), "float32").new()
    parts = separate(whole, (12, 6, 6), 1)
    assert device.held == whole.nbytes
    parts += separate(whole, (12, 6, 6), 3)
    assert device.held == 2 * whole.nbytes


def symbolic_layer(spec, device, sizes=SINGLE, sequence_parallel=False) -> SymbolicLayer:
    """Return the layer of a spec on symbolic tensors."""
    context = Context(SymbolicGrid(device, sizes), "float32", sequence_parallel=sequence_parallel)
    return SymbolicLayer(spec, SymbolicWeights(context, spec.all_parameters, gradient_bytes=1 << 20))


def contexts(spec, device) -> tuple[Layer, SymbolicLayer]:
    """Return the layer of a spec in torch, with values, and on symbolic tensors."""
    layer = Layer(spec, ShardedWeights(Context(Grid.single_device(), torch.float32)))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, symbolic_layer(spec, device)


def gradients(layer: Layer, symbolic: SymbolicLayer) -> tuple[dict, dict]:
    """Return the kinds of the gradients of the parameters of both."""
    ours = {name: kind(gradient) for name, gradient in symbolic.weights.gradients.items()}
    return ours, {name: kind(parameter.grad) for name, parameter in layer.named_parameters()}


LAYERS = {
    "linear": (LinearSpec(C, 8, bias=False), [(5, C)], 3 * 2 * 5 * C * 8),
    "fused linear": (LinearSpec(C, 8, num_fused=3), [(5, C)], 3 * 2 * 5 * C * 24),
    "convolution": (Conv2dSpec(C, 8, 3, padding=1), [IMAGE], 3 * 2 * B * SIDE**2 * C * 8 * 9),
    "enlarged": (Conv2dSpec(C, 8, 3, padding=1, upsampling=2), [IMAGE], 3 * 2 * B * 4 * SIDE**2 * C * 8 * 9),
    "halved": (Conv2dSpec(C, 8, 3, padding=1, stride=2), [IMAGE], 3 * 2 * B * SIDE**2 // 4 * C * 8 * 9),
    "scale and shift": (ScaleShiftSpec(8, C, "x"), [(B, 8)], 3 * 2 * B * 8 * 2 * C),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_results_gradients_and_products_of_torch(name):
    spec, shapes, flops = LAYERS[name]
    device = CountingDevice()
    layer, symbolic = contexts(spec, device)
    ours = in_symbols(device, lambda *inputs: run_alone(symbolic(*inputs)), shapes, torch.float32)
    theirs = in_torch(lambda *inputs: run_alone(layer(*inputs)), shapes, torch.float32)
    assert ours[:2] == theirs[:2]
    found, expected = gradients(layer, symbolic)
    assert found == expected
    assert device.flops == flops


def test_an_enlarged_input_takes_time_in_every_product():
    moved = {}
    for factor in (1, 2):
        device = CountingDevice()
        spec = Conv2dSpec(C, 8, 1, upsampling=factor, stride=factor, bias=False)
        _, symbolic = contexts(spec, device)
        in_symbols(device, lambda x, layer=symbolic: run_alone(layer(x)), [IMAGE], torch.float32)
        moved[factor] = device.moved
    small = 4 * B * SIDE**2 * C
    large = 4 * small
    # Each product reads or writes the large tensor instead of the small one, which is converted in a further kernel.
    assert moved[2] - moved[1] == 3 * (large - small) + 3 * (large + small)


def test_a_time_embedding():
    device = CountingDevice()
    layer, symbolic = contexts(TimeEmbeddingSpec(C, 8), device)
    for dtype in ("int64", "float64"):
        out = run_alone(symbolic(SymbolicTensor(device, (B,), dtype)))
        expected = run_alone(layer(torch.arange(B).to(getattr(torch, dtype))))
        assert kind(out) == kind(expected)
    tape.backward([(out, out.like().new())])
    expected.sum().backward()
    found, theirs = gradients(layer, symbolic)
    assert found == theirs


@pytest.mark.parametrize(("num_chunks", "masked"), [(1, False), (2, False), (2, True)])
def test_a_head_loss(num_chunks, masked):
    tokens, hidden, vocabulary = 6, 8, 10
    device = CountingDevice()
    layer, symbolic = contexts(LinearSpec(hidden, vocabulary, bias=False), device)

    def loss_of(layer, targets):
        return lambda x: head_loss(x, layer.weight, targets, vocabulary, layer.product, num_chunks, masked)

    targets = torch.arange(tokens)
    symbolic_targets = SymbolicTensor(device, (tokens,), "int64")
    shapes = [(tokens, hidden)]
    ours = in_symbols(device, loss_of(symbolic, symbolic_targets), shapes, torch.float32)
    assert ours[:2] == in_torch(loss_of(layer, targets), shapes, torch.float32)[:2]
    found, expected = gradients(layer, symbolic)
    assert found == expected
    assert device.flops == 3 * 2 * tokens * hidden * vocabulary
    device.records = False
    loss_of(symbolic, symbolic_targets)(SymbolicTensor(device, (tokens, hidden), "float32").new())
    assert device.flops == 4 * 2 * tokens * hidden * vocabulary


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_the_collectives_of_a_head_loss(splits_tokens):
    tokens, hidden, vocabulary = 8, 4, 10  # features and columns of this rank: 2, 5
    device = CommunicatingDevice()
    head = symbolic_layer(LinearSpec(hidden, vocabulary, bias=False), device, GridSizes(2, 2), splits_tokens)
    targets, shape = SymbolicTensor(device, (tokens,), "int64"), (tokens // (1 + splits_tokens), hidden // 2)
    results = in_symbols(
        device, lambda x: head_loss(x, head.weight, targets, vocabulary, head.product, 2), [shape], torch.float32
    )
    assert results[:2] == ([((), "float32")], [(shape, "float32")])
    assert kind(head.weights.gradients["weight"]) == ((hidden // 2, vocabulary // 2), "float32")
    x_bytes, logits_bytes = 4 * tokens * hidden // 2, 4 * tokens * vocabulary // 2
    sums = [("all_reduce", "y", logits_bytes / 2)] * 2
    if splits_tokens:
        sums = [("all_gather", "x", x_bytes / 2), *sums, ("reduce_scatter", "x", x_bytes)]
    else:
        sums += [("all_reduce", "x", x_bytes / 2)] * 2
    of_loss = [("all_reduce", "x", 4 * tokens / 2), ("all_reduce", "x", 4 * tokens)] * 2
    assert sorted(device.started) == sorted([*sums, *of_loss])
