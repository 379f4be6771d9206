"""The recorded costs of kernels without torch.compile, and the shapes of the results of kernels.

``python -m tests.parallel.test_eager_costs`` records the costs again.
"""

import json
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.memory import allocated_peak
from benchmarks.laboratory.virtual_operations import Operations, has_kernel, nbytes, tensors_in
from gpt4d.parallel.layers import (
    activations,
    attention,
    context_attention,
    conv,
    embedding,
    experts,
    float8,
    group_norm,
    heads,
    linear,
    loss,
    norm,
    product,
    routing,
    sequence,
)
from gpt4d.parallel.symbolic.kernels import EAGER_COSTS, Kernel, PlannedKernel
from gpt4d.parallel.symbolic.tensor import SymbolicTensor

ROWS, FEATURES = 2048, 512  # so many that statistics of rows and parameters do not count
DTYPES = torch.float32, torch.bfloat16


def examples(dtype: torch.dtype) -> list[tuple[Kernel, tuple]]:
    """Return kernels with arguments: features of ``dtype``, statistics and parameters in float32."""
    x, branch, d_out, d_stream = torch.randn(4, ROWS, FEATURES).to(dtype)
    mean, rstd, weight, bias = torch.randn(ROWS, 1), torch.rand(ROWS, 1), torch.randn(FEATURES), torch.randn(FEATURES)
    sums = torch.randn(2, ROWS, 1)
    pair, x_heads = torch.randn(ROWS, 2, FEATURES).to(dtype), torch.randn(1, ROWS, 8, FEATURES // 8).to(dtype)
    cos, sin = torch.randn(2, 1, ROWS, 1, FEATURES // 8)
    found: list[tuple[Kernel, tuple]] = []
    for added in (None, branch):
        found += [
            (norm.layer_norm, (x, added, weight, bias, 1e-5)),
            (norm.mean_and_variance, (x, added)),
            (norm.rms_norm, (x, added, weight, 1e-5)),
            (norm.sum_of_squares, (x, added)),
        ]
    for added in (None, d_stream):
        found += [
            (norm.layer_norm_gradients, (d_out, added, x, weight, bias, mean, rstd)),
            (norm.split_layer_norm_gradients, (d_out, added, x, mean, rstd, weight, sums)),
            (norm.rms_norm_gradients, (d_out, added, x, rstd, weight)),
            (norm.split_rms_norm_gradients, (d_out, added, x, rstd, weight, sums[0])),
        ]
    return [
        *found,
        (norm.combined_statistics, (torch.rand(4, 2, ROWS), 1e-5)),
        (norm.reciprocal_root, (torch.rand(ROWS), FEATURES, 1e-5)),
        (norm.mean_of, (torch.rand(2, ROWS), FEATURES)),
        (loss.largest_logits, (x, FEATURES)),
        (norm.normalized, (x, mean, rstd, weight, bias)),
        (norm.sums_of_gradient, (d_out, x, mean, rstd, weight)),
        (norm.scaled, (x, rstd, weight)),
        (norm.sum_of_rms_gradient, (d_out, x, rstd, weight)),
        (activations.gelu_gradients, (d_out, x, bias)),
        (activations.swiglu, (pair,)),
        (activations.swiglu_gradient, (d_out, pair)),
        (activations.geglu, (pair,)),
        (activations.geglu_gradient, (d_out, pair)),
        (heads.rotated, (x_heads, cos, sin, 1)),
        (loss.sums_of_exponentials, (x, sums[0, :, 0], FEATURES)),
        (loss.softmax_, (x.clone(), sums[0, :, 0], sums[1, :, 0], FEATURES)),
        *examples_of_embeddings(x, d_out),
        *examples_of_targets(x),
        *examples_of_pictures(dtype),
        *examples_of_float8(x),
        *examples_of_shared_sequences(x_heads),
        *examples_of_experts(x, pair),
        (product.local_bias, (bias, x, 2, 1)),
        (attention.weight_rows, (torch.arange(8), torch.arange(ROWS).expand(8, -1), 4, 2, 5)),
        (attention.window_mask, (x_heads, None, None, 64)),
        (heads.rotations, (torch.arange(ROWS)[None], x, (1.0, 0.5, 0.2), 1.0)),
        (activations.row_keys, (torch.arange(ROWS), torch.arange(ROWS), 3)),
        (activations.dropped, (x, torch.arange(ROWS), 0, 0.5)),
    ]


def examples_of_embeddings(x: torch.Tensor, d_out: torch.Tensor) -> list[tuple[Kernel, tuple]]:
    table, ids, elsewhere = torch.randn(4 * ROWS, FEATURES), torch.arange(ROWS), torch.arange(ROWS) > ROWS // 2
    return [
        (embedding.look_up, (table.to(x.dtype), ids, 0)),
        (embedding.clear_, (x.clone(), elsewhere)),
        (embedding.cleared, (d_out, elsewhere, table)),
        (embedding.table_gradient, (d_out.float(), ids, len(table), None)),
        (embedding.table_gradient, (d_out.float(), ids, len(table), table.clone())),
        (embedding.add_positions, (x, table, ROWS // 4)),
        (embedding.positions_gradient, (d_out, table[: ROWS // 4], ROWS // 4)),
        (embedding.add_rows_at, (x, table, ids)),
        (embedding.rows_at_gradient, (d_out, table, ids)),
    ]


def examples_of_float8(x: torch.Tensor) -> list[tuple[Kernel, tuple]]:
    weight, one = torch.randn(FEATURES, 4, FEATURES), torch.ones(())
    values = torch.randn(4 * FEATURES, FEATURES).to(torch.float8_e4m3fn)
    return [
        (float8.scale, (x, float8.VALUES)),
        (float8.quantized, (x, one, float8.VALUES, False)),
        (float8.quantized, (x, one, float8.GRADIENTS, True)),
        (float8.packed, (weight.to(x.dtype), one)),
        (float8.joined, (torch.zeros(2 * (4 * FEATURES**2 + float8.SCALE_BYTES), dtype=torch.uint8), 2, FEATURES)),
        (float8.transposed, (values,)),
    ]


def examples_of_shared_sequences(keys: torch.Tensor) -> list[tuple[Kernel, tuple]]:
    """Return kernels of attention. ``keys``: [1, ROWS, heads, size]."""
    gathered, statistics = keys.unflatten(1, (8, -1)).movedim(1, 0), torch.randn(2, 1, keys.shape[2], ROWS)
    out = keys.float()
    return [
        (context_attention.in_sequence_order, (gathered, 4)),
        (context_attention.in_rank_order, (torch.stack((keys, keys)), 4)),
        (context_attention.no_gradient, (keys,)),
        (context_attention.no_results, (keys, statistics[0])),
        (context_attention.add_places_, (keys.clone(), keys[:, : ROWS // 2], 512)),
        (context_attention.combine_, (out, statistics[0], out.clone(), statistics[1], 0)),
        (context_attention.segment_mask, (keys, None, ROWS, 0, 2 * ROWS, None)),
        (context_attention.segments_mask, (keys, None, 4, 1)),
        (sequence.own_segments, (torch.arange(8 * ROWS).view(8, ROWS), 4, 1)),
    ]


SCORING = routing.Scoring(8, normalized=True)


def examples_of_experts(x: torch.Tensor, pair: torch.Tensor) -> list[tuple[Kernel, tuple]]:
    """Return kernels of experts. ``pair``: [ROWS, 2, FEATURES]."""
    logits = torch.randn(ROWS, 64)
    chosen = routing.chosen_experts(logits, None, SCORING)
    weights, place, row_weights = torch.rand(ROWS, 8), torch.randperm(ROWS), torch.rand(ROWS, 1)
    balance = routing.Balance(0.1, 0.1)
    return [
        (routing.chosen_experts, (logits, None, SCORING)),
        (routing.chosen_experts, (logits, logits[0], SCORING)),
        (routing.expert_weights, (logits, chosen, SCORING)),
        (routing.logits_gradient, (weights, logits, chosen, None, SCORING, balance._replace(loss=0.0))),
        (routing.logits_gradient, (weights, logits, chosen, logits[0], SCORING, balance)),
        (routing.routing_statistics, (logits, chosen, SCORING)),
        (experts.in_expert_order, (chosen, 64)),
        (experts.experts_of_rows, (torch.full((64,), ROWS // 64), 8, ROWS)),
        (experts.selected_rows, (x, place, 1)),
        (experts.summed_rows, (x, place, 8)),
        (experts.weighted_swiglu, (pair, row_weights)),
        (experts.weighted_swiglu_gradients, (x, pair, row_weights)),
    ]


def examples_of_targets(logits: torch.Tensor) -> list[tuple[Kernel, tuple]]:
    row, targets, elsewhere = torch.rand(ROWS), torch.arange(ROWS) % FEATURES, torch.arange(ROWS) > ROWS // 2
    return [
        (loss.local_targets, (targets, 0, FEATURES)),
        (loss.target_logits, (logits, row, targets, elsewhere)),
        (loss.total_loss, (torch.rand(2, ROWS),)),
        (loss.target_gradients, (logits, torch.ones(()), row, row, targets, elsewhere, 0.0)),
        (loss.write_targets_, (logits.clone(), row, targets, FEATURES - 64)),
    ]


def examples_of_pictures(dtype: torch.dtype) -> list[tuple[Kernel, tuple]]:
    samples, side, channels, count = 8, 16, 64, 16
    image, d_out = torch.randn(2, samples, side, side, channels).to(dtype)
    groups, (weight, bias) = group_norm.Groups(tuple(index // 4 for index in range(channels)), count), torch.rand(2, 64)
    of_channel, members = group_norm.group_index(image, groups)
    mean, rstd = torch.rand(2, samples, channels)
    sums, moments = (torch.rand(2, samples, channels), torch.rand(2, samples, count)), torch.rand(2, 3, samples, count)
    found: list[tuple[Kernel, tuple]] = [(group_norm.group_moments, (image, members))]
    for changes in ((None, None), torch.rand(2, samples, channels).to(dtype).unbind()):
        affine, statistics = (weight, bias, *changes), (image, mean, rstd)
        found += [
            (group_norm.normalized, (image, moments, of_channel, *affine, 4, 1e-5, True)),
            (group_norm.group_norm, (image, of_channel, members, *affine, 4, 1e-5, True)),
            (group_norm.normalized_again, (*statistics, *affine, True)),
            (group_norm.gradient_sums, (d_out, *statistics, *affine, members, True)),
            (
                group_norm.split_group_norm_gradients,
                (d_out, *statistics, *affine, *sums, of_channel, 4 * side**2, True),
            ),
            (
                group_norm.group_norm_gradients,
                (d_out, *statistics, *affine, of_channel, members, 4 * side**2, True),
            ),
        ]
    return [
        *found,
        (conv.enlarged, (image, 2)),
        (conv.sums_of_repeated, (d_out, 2)),
        (embedding.sinusoids, (torch.arange(ROWS), 128)),
    ]


def further_examples() -> list[tuple[Kernel, tuple]]:
    """Return kernels with arguments whose costs the planner does not take from their shapes."""
    x, d_out, bias = torch.randn(6, 8), torch.randn(6, 4), torch.randn(2, 4)
    ids, image, channels = torch.arange(6), torch.randn(2, 6, 6, 3), torch.randn(4, 3, 3, 3)
    settings = conv.Convolution((2, 2), (1, 1), 1, in_first=False)
    in_first = replace(settings, in_first=True)
    enlarging = replace(in_first, upsampling=2)
    halved = torch.randn(2, 3, 3, 4)
    row, logits = torch.rand(6), torch.randn(6, 8)
    x8 = x.to(torch.float8_e4m3fn)
    queries, keys, statistics = torch.randn(2, 4, 6, 8), torch.randn(2, 8, 3, 8), torch.randn(2, 6, 4)
    block = context_attention.Block(2, 4, 1, 6)
    matrices, rows = torch.randn(3, 8, 2, 4), torch.tensor([2, 0, 4])
    return [
        (activations.gelu, (x,)),
        (embedding.multiplied, (x, 3.0)),
        (product.cast, (x, bias.bfloat16())),
        (product.cast_to, (x, torch.bfloat16)),
        (product.add_bias_, (x.clone(), torch.randn(8))),
        (product.add_bias, (x, torch.randn(8))),
        (product.add_gradient_, (x.clone(), x)),
        (product.bias_gradient, (torch.randn(6, 2, 4), bias)),
        (product.parts_first, (x, 2)),
        (product.parts_last, (torch.randn(2, 6, 4),)),
        (product.placeholder, (x, (3, 5))),
        (linear.linear, (x, torch.randn(8, 2, 4), bias, False)),
        (linear.linear_input_gradient, (d_out, torch.randn(8, 4), x, False)),
        (linear.linear_weight_gradient, (d_out, x, torch.randn(4, 4), None, False)),
        (conv.convolution, (image, channels, None, settings)),
        (conv.convolution_input_gradient, (halved, channels, image, settings)),
        (conv.convolution_input_gradient, (torch.randn(2, 6, 6, 4), channels.movedim(0, 1), image, enlarging)),
        (conv.convolution_weight_gradient, (halved, image, channels, settings)),
        (conv.convolution_weight_gradient, (halved, image, channels, in_first)),
        (conv.as_stored, (channels.bfloat16(), channels)),
        (float8.unpacked, (torch.zeros(8 * 6 + float8.SCALE_BYTES, dtype=torch.uint8), 8)),
        (float8.float8_product, (x8, x8, row[0], row[0], None, torch.float32, False)),
        (group_norm.group_index, (image, group_norm.Groups((0, 0, 1), 2))),
        (norm.among_zeros, (row, 1, 4)),
        (loss.one_like, (torch.ones(()),)),
        (loss.total, (torch.ones(()), torch.ones(()))),
        (loss.total_loss_of_targets, (torch.rand(2, ROWS), torch.arange(ROWS) - 3)),
        (loss.token_losses, (torch.rand(2, ROWS), torch.arange(ROWS) - 3)),
        (loss.scale_, (x.clone(), torch.ones(()))),
        (loss.add_scaled_, (x.clone(), x, torch.ones(()))),
        (loss.stacked, (row, row)),
        (loss.zero_, (logits.clone(),)),
        (sequence.local_part, (ids.view(2, 3), 2, 3, 1)),
        (sequence.in_gathered_order, (ids.view(2, 3), 2, 3)),
        (context_attention.block_attention, (queries, keys, keys, None, block, None)),
        (context_attention.block_gradients, (queries, queries, keys, keys, queries, statistics, None, block, None)),
        (experts.grouped_linear, (x, matrices, rows)),
        (experts.grouped_input_gradient, (torch.randn(6, 2, 4), matrices, x, rows)),
        (experts.grouped_weight_gradient, (torch.randn(6, 2, 4), x, matrices, None, rows)),
        (experts.grouped_weight_gradient, (torch.randn(6, 2, 4), x, matrices, matrices.clone(), rows)),
        (routing.router_logits, (x, torch.randn(8, 3))),
        (routing.router_gradients, (torch.randn(6, 3), x, torch.randn(8, 3))),
        (sequence.places_of, (ids, 4)),
        (sequence.places_in_segments, (ids, 4, 2, 1)),
        (sequence.samples_of, (ids, 4)),
    ]


def symbolic(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, torch.Tensor):
        return value
    device = SimpleNamespace(is_cpu=True)
    return SymbolicTensor(device, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def test_the_declared_shapes_and_dtypes_are_those_of_the_results():
    checked = set()
    for kernel, arguments in [*examples(torch.float32), *examples(torch.bfloat16), *further_examples()]:
        declared = kernel.shapes(*map(symbolic, arguments))
        results = function_of(kernel)(*arguments)
        as_tuple = [value if isinstance(value, tuple) else (value,) for value in (declared, results)]
        for one, other in zip(*as_tuple, strict=True):
            assert (one is None) == (other is None), kernel.name
            assert one is None or (one.shape, one.dtype) == (symbolic(other).shape, symbolic(other).dtype), kernel.name
        checked.add(kernel.name)
    layers = [activations, attention, context_attention, conv, embedding, float8, group_norm, heads, loss]
    layers += [experts, linear, norm, product, routing]
    found = [value for layer in (*layers, sequence) for value in vars(layer).values()]
    assert checked == {one.name for one in found if isinstance(one, Kernel) and not isinstance(one, PlannedKernel)}


def function_of(kernel: Kernel):
    """Return a kernel's function on torch's tensors, which is not compiled."""
    return getattr(import_module(f"{kernel.__module__}_kernels"), kernel.__name__)


class Counter(TorchDispatchMode):
    """Counts operations and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        # Products take no time, a byte takes a second.
        self.costs, self.operations, self.moved = Operations(float("inf"), 1e-9, 0.0, 0), 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if has_kernel(func, list(tensors_in((args, kwargs))), kwargs):
            self.operations += 1
            self.moved += self.costs.cost(func, args, kwargs).seconds
        return func(*args, **kwargs)


def measure(kernel: Kernel, arguments: tuple) -> tuple[float, int, float]:
    """Return the bytes moved, relative to ``Kernel.minimum_bytes``, the operations, and temporary bytes."""
    function = function_of(kernel)
    with Counter() as counter:
        results = function(*arguments)
    needed = kernel.minimum_bytes(*map(symbolic, arguments))
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(arguments)}
    new = sum(nbytes(one) for one in tensors_in(results) if one.untyped_storage().data_ptr() not in given)
    del results
    temporary = allocated_peak(lambda: function(*arguments)) - new
    return round(counter.moved / needed, 3), counter.operations, round(max(0, temporary) / needed, 3)


def measured() -> dict[str, tuple[float, int, float]]:
    costs = {}
    for dtype in DTYPES:
        for kernel, arguments in examples(dtype):
            first, *others = tensors_in(arguments)
            costs[f"{kernel.name} {symbolic(first).dtype} {1 + len(others)}"] = measure(kernel, arguments)
    return costs


@pytest.mark.slow
def test_the_recorded_costs_are_those_of_the_kernels():
    recorded = json.loads(EAGER_COSTS.read_text())
    found = measured()
    assert recorded.keys() == found.keys()
    for name, cost in found.items():
        assert recorded[name] == pytest.approx(cost, abs=2e-3), name


if __name__ == "__main__":
    lines = (f'  "{name}": {json.dumps(cost)}' for name, cost in measured().items())
    EAGER_COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
