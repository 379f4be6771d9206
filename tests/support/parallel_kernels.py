"""Kernels with arguments, for tests of their shapes, their costs and their compiled functions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch

from gpt4d.parallel.kernels import Kernel
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
from gpt4d.parallel.symbolic.tensor import SymbolicTensor

Examples = list[tuple[Kernel, tuple]]
SCORING = routing.Scoring(8, normalized=True)


class Sizes(NamedTuple):
    """Sizes of the arguments: of tokens, and of images."""

    rows: int = 2048
    features: int = 512
    heads: int = 8
    images: int = 8
    side: int = 16
    channels: int = 64
    groups: int = 16


SIZES = Sizes()  # statistics and parameters do not count
ROWS, FEATURES = SIZES[:2]


def symbolic(value):
    """Return the symbolic tensor, or the name of the dtype, for an argument."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, torch.Tensor):
        return value
    return SymbolicTensor(SimpleNamespace(is_cpu=True), tuple(value.shape), symbolic(value.dtype))


def fused_examples(dtype: torch.dtype, sizes: Sizes = SIZES) -> Examples:
    """Return compiled kernels with arguments: features of ``dtype``, statistics and parameters in float32.

    If a kernel has several examples, its last one has the most tensors.
    """
    rows, features, num_heads = sizes[:3]
    x, branch, d_out, d_stream = torch.randn(4, rows, features).to(dtype)
    mean, rstd, weight, bias = torch.randn(rows, 1), torch.rand(rows, 1), torch.randn(features), torch.randn(features)
    sums, pair = torch.randn(2, rows, 1), torch.randn(rows, 2, features).to(dtype)
    x_heads = torch.randn(1, rows, num_heads, features // num_heads).to(dtype)
    cos, sin = torch.randn(2, 1, rows, 1, features // num_heads)
    found: Examples = []
    for added, d_added in ((None, None), (branch, d_stream)):
        found += [
            (norm.layer_norm, (x, added, weight, bias, 1e-5)),
            (norm.mean_and_variance, (x, added)),
            (norm.rms_norm, (x, added, weight, 1e-5)),
            (norm.sum_of_squares, (x, added)),
            (norm.layer_norm_gradients, (d_out, d_added, x, weight, bias, mean, rstd)),
            (norm.split_layer_norm_gradients, (d_out, d_added, x, mean, rstd, weight, sums)),
            (norm.rms_norm_gradients, (d_out, d_added, x, rstd, weight)),
            (norm.split_rms_norm_gradients, (d_out, d_added, x, rstd, weight, sums[0])),
        ]
    return [
        *found,
        (norm.normalized, (x, mean, rstd, weight, bias)),
        (norm.sums_of_gradient, (d_out, x, mean, rstd, weight)),
        (norm.scaled, (x, rstd, weight)),
        (norm.sum_of_rms_gradient, (d_out, x, rstd, weight)),
        (activations.gelu_gradients, (d_out, x, bias)),
        (activations.swiglu, (pair,)),
        (activations.swiglu_gradient, (d_out, pair)),
        (activations.geglu, (pair,)),
        (activations.geglu_gradient, (d_out, pair)),
        (activations.dropped, (x, torch.arange(rows) << 32, 0, 0.5)),
        (heads.rotated, (x_heads, cos, sin, 1)),
        (heads.rotated, (x_heads, cos, sin, -1)),
        (float8.scale, (x, float8.VALUES)),
        (float8.quantized, (x, torch.ones(()), float8.VALUES, False)),
        (float8.quantized, (x, torch.ones(()), float8.GRADIENTS, True)),
        (float8.transposed, (torch.randn(4 * features, features).to(torch.float8_e4m3fn),)),
        (experts.weighted_swiglu, (pair, torch.rand(rows, 1))),
        (experts.weighted_swiglu_gradients, (x, pair, torch.rand(rows, 1))),
        *_group_norms(dtype, sizes),
    ]


def _group_norms(dtype: torch.dtype, sizes: Sizes) -> Examples:
    *_, images, side, channels, count = sizes
    image, d_out = torch.randn(2, images, side, side, channels).to(dtype)
    groups = group_norm.Groups(tuple(channel * count // channels for channel in range(channels)), count)
    of_channel, members = group_norm.group_index(image, groups)
    weight, bias = torch.rand(2, channels)
    mean, rstd = torch.rand(2, images, channels)
    sums, moments = (torch.rand(2, images, channels), torch.rand(2, images, count)), torch.rand(2, 3, images, count)
    found: Examples = [(group_norm.group_moments, (image, members))]
    for changes in ((None, None), torch.rand(2, images, channels).to(dtype).unbind()):
        affine = weight, bias, *changes
        values = d_out, image, mean, rstd, *affine
        found += [
            (group_norm.normalized, (image, moments, of_channel, *affine, 4, 1e-5, True)),
            (group_norm.group_norm, (image, of_channel, members, *affine, 4, 1e-5, True)),
            (group_norm.normalized_again, (image, mean, rstd, *affine, True)),
            (group_norm.gradient_sums, (*values, members, True)),
            (group_norm.split_group_norm_gradients, (*values, *sums, of_channel, 4 * side**2, True)),
            (group_norm.group_norm_gradients, (*values, of_channel, members, 4 * side**2, True)),
        ]
    return found


def examples(dtype: torch.dtype) -> Examples:
    """Return the kernels whose costs are recorded, with arguments: features of ``dtype``."""
    x, d_out = torch.randn(2, ROWS, FEATURES).to(dtype)
    x_heads = torch.randn(1, ROWS, SIZES.heads, FEATURES // SIZES.heads).to(dtype)
    image, d_image = torch.randn(2, SIZES.images, SIZES.side, SIZES.side, SIZES.channels).to(dtype)
    row, statistics, bias, one = torch.rand(ROWS), torch.randn(2, ROWS), torch.randn(FEATURES), torch.ones(())
    table, ids = torch.randn(4 * ROWS, FEATURES), torch.arange(ROWS)
    targets, elsewhere = ids % FEATURES, ids > ROWS // 2
    weight = torch.randn(FEATURES, 4, FEATURES).to(dtype)
    packed = torch.zeros(2 * (4 * FEATURES**2 + float8.SCALE_BYTES), dtype=torch.uint8)
    gathered, log_sums = x_heads.unflatten(1, (8, -1)).movedim(1, 0), torch.randn(2, 1, SIZES.heads, ROWS)
    out, logits, weights, place = x_heads.float(), torch.randn(ROWS, 64), torch.rand(ROWS, 8), torch.randperm(ROWS)
    chosen, balance = routing.chosen_experts(logits, None, SCORING), routing.Balance(0.1, 0.1)
    return [
        *fused_examples(dtype),
        (norm.combined_statistics, (torch.rand(4, 2, ROWS), 1e-5)),
        (norm.reciprocal_root, (row, FEATURES, 1e-5)),
        (norm.mean_of, (torch.rand(2, ROWS), FEATURES)),
        (loss.largest_logits, (x, FEATURES)),
        (loss.sums_of_exponentials, (x, statistics[0], FEATURES)),
        (loss.softmax_, (x.clone(), *statistics, FEATURES)),
        (loss.local_targets, (targets, 0, FEATURES)),
        (loss.target_logits, (x, row, targets, elsewhere)),
        (loss.total_loss, (torch.rand(2, ROWS),)),
        (loss.target_gradients, (x, one, row, row, targets, elsewhere, 0.0)),
        (loss.write_targets_, (x.clone(), row, targets, FEATURES - 64)),
        (embedding.look_up, (table.to(dtype), ids, 0)),
        (embedding.clear_, (x.clone(), elsewhere)),
        (embedding.cleared, (d_out, elsewhere, table)),
        (embedding.table_gradient, (d_out.float(), ids, len(table), None)),
        (embedding.table_gradient, (d_out.float(), ids, len(table), table.clone())),
        (embedding.add_positions, (x, table, ROWS // 4)),
        (embedding.positions_gradient, (d_out, table[: ROWS // 4], ROWS // 4)),
        (embedding.add_rows_at, (x, table, ids)),
        (embedding.rows_at_gradient, (d_out, table, ids)),
        (embedding.sinusoids, (ids, 128)),
        (conv.enlarged, (image, 2)),
        (conv.sums_of_repeated, (d_image, 2)),
        (float8.packed, (weight, one)),
        (float8.joined, (packed, 2, FEATURES)),
        (context_attention.in_sequence_order, (gathered, 4)),
        (context_attention.in_rank_order, (torch.stack((x_heads, x_heads)), 4)),
        (context_attention.no_gradient, (x_heads,)),
        (context_attention.no_results, (x_heads, log_sums[0])),
        (context_attention.add_places_, (x_heads.clone(), x_heads[:, : ROWS // 2], 512)),
        (context_attention.combine_, (out, log_sums[0], out.clone(), log_sums[1], 0)),
        (context_attention.segment_mask, (x_heads, None, ROWS, 0, 2 * ROWS, None)),
        (context_attention.segments_mask, (x_heads, None, 4, 1)),
        (sequence.own_segments, (torch.arange(8 * ROWS).view(8, ROWS), 4, 1)),
        (routing.chosen_experts, (logits, None, SCORING)),
        (routing.chosen_experts, (logits, logits[0], SCORING)),
        (routing.expert_weights, (logits, chosen, SCORING)),
        (routing.logits_gradient, (weights, logits, chosen, None, None, SCORING, balance._replace(loss=0.0))),
        (routing.logits_gradient, (weights, logits, chosen, logits[0], None, SCORING, balance)),
        (routing.routing_statistics, (logits, chosen, None, SCORING)),
        (experts.in_expert_order, (chosen, 64)),
        (experts.experts_of_rows, (torch.full((64,), ROWS // 64), 8, ROWS)),
        (experts.selected_rows, (x, place, 1)),
        (experts.summed_rows, (x, place, 8)),
        (product.local_bias, (bias, x, 2, 1)),
        (attention.weight_rows, (torch.arange(8), ids.expand(8, -1), 4, 2, 5)),
        (attention.window_mask, (x_heads, None, None, 64)),
        (heads.rotations, (ids[None], x, (1.0, 0.5, 0.2), 1.0)),
        (activations.row_keys, (ids, ids, 3)),
    ]


def further_examples() -> Examples:
    """Return kernels with arguments whose costs the planner does not take from their shapes."""
    x, d_out, bias = torch.randn(6, 8), torch.randn(6, 4), torch.randn(2, 4)
    ids, image, channels = torch.arange(6), torch.randn(2, 6, 6, 3), torch.randn(4, 3, 3, 3)
    settings = conv.Convolution((2, 2), (1, 1), 1, in_first=False)
    in_first = replace(settings, in_first=True)
    enlarging = replace(in_first, upsampling=2)
    halved, row, x8 = torch.randn(2, 3, 3, 4), torch.rand(6), x.to(torch.float8_e4m3fn)
    queries, keys, statistics = torch.randn(2, 4, 6, 8), torch.randn(2, 8, 3, 8), torch.randn(2, 6, 4)
    block = context_attention.KeyBlock(2, 4, 1, 6)
    matrices, rows = torch.randn(3, 8, 2, 4), torch.tensor([2, 0, 4])
    return [
        (activations.gelu, (x,)),
        (embedding.multiplied, (x, 3.0)),
        (embedding.sinusoids, (row.double(), 128)),
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
        (loss.zero_, (x.clone(),)),
        (sequence.local_part, (ids.view(2, 3), 2, 3, 1)),
        (sequence.in_gathered_order, (ids.view(2, 3), 2, 3)),
        (context_attention.block_attention, (queries, keys, keys, None, block, None)),
        (context_attention.block_gradients, (queries, queries, keys, keys, queries, statistics, None, block, None)),
        (experts.grouped_linear, (x, matrices, rows)),
        (experts.grouped_input_gradient, (torch.randn(6, 2, 4), matrices, x, rows)),
        (experts.grouped_weight_gradient, (torch.randn(6, 2, 4), x, matrices, None, rows)),
        (experts.grouped_weight_gradient, (torch.randn(6, 2, 4), x, matrices, matrices.clone(), rows)),
        (
            routing.logits_gradient,
            (row[:, None], x, ids[:, None], x[0].exp(), ids < 4, routing.Scoring(1), routing.Balance(1, 1)),
        ),
        (routing.routing_statistics, (x, ids[:, None], ids < 4, routing.Scoring(1))),
        (routing.router_logits, (x, torch.randn(8, 3))),
        (routing.router_gradients, (torch.randn(6, 3), x, torch.randn(8, 3))),
        (sequence.places_of, (ids, 4)),
        (sequence.places_in_segments, (ids, 4, 2, 1)),
        (sequence.samples_of, (ids, 4)),
    ]
