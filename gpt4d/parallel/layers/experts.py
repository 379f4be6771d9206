"""Experts of a mixture on the 4-D grid: z splits the experts, x and y split each expert's features.

With ``parallel.expert_data``, data also splits the experts. Each rank sends the activations of its tokens to the ranks
with their experts. The number of rows that an expert receives depends on the routing, and no token is dropped.

Shapes: T: tokens of this rank; K: experts of a token; R: rows that this rank receives, one for each pair of a token and
an expert; E: experts of this rank; H, N: its features of the residual stream and within experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Pass
from gpt4d.parallel.kernels import Function, KernelFunction, Symbolic, Tensor, kernel
from gpt4d.parallel.layers.exchange import Exchanges, all_to_all, exchanged, summed, summed_gradient
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import matmul, product
from gpt4d.parallel.layers.product import TOKENS, Input, ProductContext, Recomputable, multiply, start_gather
from gpt4d.parallel.layers.routing import Routing
from gpt4d.parallel.layout import Layout, Matrices, ParameterSpec
from gpt4d.parallel.lazy import F, torch


def _flops(rows_RK, weight_EKN) -> int:
    return 2 * rows_RK.shape[0] * math.prod(weight_EKN.shape[1:])


def _linear(x_RK, weight, rows_E):
    return x_RK.like((x_RK.shape[0], *weight.shape[2:]))


def _on_cpu(result) -> int:
    """Return the bytes of the results of all experts, which a CPU computes one by one and then joins."""
    return result.nbytes if result.is_cpu else 0


def _grouped(x) -> bool:
    """Return whether one kernel multiplies the rows of all experts: for bf16 on GPUs."""
    return not x.is_cpu and x.dtype == torch.bfloat16


def _ends(rows_E):
    return rows_E.cumsum(0, dtype=torch.int32)


def _joined(parts):
    """Concatenate the results of experts. The result of one expert is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _products(rows, matrices, rows_E):
    """Return the product of each row with its expert's matrix."""
    if _grouped(rows):
        return F.grouped_mm(rows, matrices, offs=_ends(rows_E))
    parts = rows.split(rows_E.tolist())
    return _joined([matmul(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


@kernel(
    _linear,
    flops=lambda x_RK, weight, rows_E: _flops(x_RK, weight),
    copied=lambda *args: 2 * _on_cpu(_linear(*args)),
    temporary=lambda *args: _on_cpu(_linear(*args)),
)
def grouped_linear(x_RK, weight, rows_E):
    """Return the product of each row with its expert's weight.

    Args:
        x_RK: rows in the order of their experts.
        weight: [E, K, *N].
        rows_E: number of rows of each expert, int64.
    """
    return _products(x_RK, weight.flatten(2), rows_E).view(len(x_RK), *weight.shape[2:])


@kernel(
    lambda d_out_RN, weight, x_RK, *_: x_RK.like(),
    flops=lambda d_out_RN, weight, x_RK, rows_E: _flops(x_RK, weight),
    unread=("x_RK",),
    copied=lambda d_out_RN, weight, x_RK, rows_E: 2 * _on_cpu(x_RK),
    temporary=lambda d_out_RN, weight, x_RK, rows_E: _on_cpu(x_RK),
)
def grouped_input_gradient(d_out_RN, weight, x_RK, rows_E):
    """Return the gradient of the input of ``grouped_linear``."""
    return _products(d_out_RN.flatten(1), weight.flatten(2).transpose(1, 2), rows_E)


@kernel(
    lambda d_out_RN, x_RK, weight, added_to, *_: added_to or weight.like(),
    flops=lambda d_out_RN, x_RK, weight, added_to, rows_E: _flops(x_RK, weight),
    unread=("weight",),
    copied=lambda d_out_RN, x_RK, weight, added_to, rows_E: 0 if added_to else 2 * _on_cpu(weight),
    temporary=lambda d_out_RN, x_RK, weight, added_to, rows_E: 0 if added_to else _on_cpu(weight),
)
def grouped_weight_gradient(d_out_RN, x_RK, weight, added_to, rows_E):
    """Return the gradient of the weight in the dtype of its master ``weight``, added to ``added_to`` if given."""
    # torch's grouped kernel supports only results in bf16, to which each microbatch's gradient is rounded once.
    d_rows = d_out_RN.flatten(1)
    if _grouped(x_RK):
        gradient = F.grouped_mm(x_RK.t(), d_rows, offs=_ends(rows_E)).view(weight.shape)
        return gradient.to(weight.dtype) if added_to is None else added_to.add_(gradient)
    parts = zip(x_RK.split(rows_E.tolist()), d_rows.split(rows_E.tolist()), strict=True)
    if added_to is None:
        return _joined([product(x.t(), d, weight.dtype) for x, d in parts]).view(weight.shape)
    for total, (x, d) in zip(added_to.flatten(2), parts, strict=True):
        product(x.t(), d, weight.dtype, total)
    return added_to


@dataclass(frozen=True, eq=False)
class GroupedMatmul:
    """The products of rows with the weights of their experts (gpt4d.parallel.layers.product.Operation)."""

    rows_E: Tensor

    def forward(self, x_BK, weight, bias):
        return grouped_linear(x_BK, weight, self.rows_E)

    def input_gradient(self, d_out_BN, weight, x_BK):
        return grouped_input_gradient(d_out_BN, weight, x_BK, self.rows_E)

    def weight_gradient(self, d_out_BN, x_BK, weight, added_to):
        return grouped_weight_gradient(d_out_BN, x_BK, weight, added_to, self.rows_E)


def _in_expert_order_results(experts, count: int):
    rows = experts.like((experts.nbytes // experts.itemsize,))
    return rows, rows.like(), rows.like((count,))


@kernel(_in_expert_order_results)
def in_expert_order(experts, count: int):
    """Return how to sort rows by their experts: the order, the index of each row in it, and the rows of each expert.

    Args:
        experts: the expert of each row, of any shape, int64.
        count: number of experts.
    """
    experts = experts.flatten()
    order = experts.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    rows = order.new_zeros(count).scatter_add_(0, experts, order.new_ones(()).expand(len(experts)))
    return order, place, rows


@kernel(lambda rows_of_ranks, ranks, total: rows_of_ranks.like((total,)))
def experts_of_rows(rows_of_ranks, ranks: int, total: int):
    """Return the expert of each received row, of ``total``.

    ``rows_of_ranks``: number of rows from each rank for each of this rank's experts, rank by rank.
    """
    experts = torch.arange(len(rows_of_ranks) // ranks, device=rows_of_ranks.device).repeat(ranks)
    return experts.repeat_interleave(rows_of_ranks, output_size=total)


@kernel(
    lambda x, order, *_: x.like((order.shape[0], *x.shape[1:])),
    moved=lambda x, order, each: 2 * order.shape[0] * x.nbytes // x.shape[0] + order.nbytes,
)
def selected_rows(x, order, each: int):
    """Return the rows of ``x`` that ``order`` lists, where each row of ``x`` counts as ``each`` rows."""
    return x.index_select(0, order if each == 1 else order // each)


@kernel(
    lambda rows, place, each: rows.like((place.shape[0] // each, *rows.shape[1:])),
    moved=lambda rows, place, each: 3 * rows.nbytes + rows.nbytes // each + place.nbytes,
)
def summed_rows(rows, place, each: int):
    """Return the sums of ``each`` rows, which are at consecutive entries of ``place``, in this order."""
    return rows.index_select(0, place).unflatten(0, (-1, each)).sum(1)


class SelectedRowsFunction(Function):
    """``selected_rows``. ``place`` is the inverse of ``order``."""

    @staticmethod
    def forward(ctx, x, order, place, each: int):
        ctx.place, ctx.each = place, each
        return selected_rows(x, order, each)

    @staticmethod
    def backward(ctx, d_rows):
        if ctx.each == 1:
            return selected_rows(d_rows, ctx.place, 1), None, None, None
        return summed_rows(d_rows, ctx.place, ctx.each), None, None, None


class SummedRowsFunction(Function):
    """``summed_rows``. ``order`` is the inverse of ``place``."""

    @staticmethod
    def forward(ctx, rows, order, place, each: int):
        ctx.order, ctx.each = order, each
        return summed_rows(rows, place, each)

    @staticmethod
    def backward(ctx, d_sums):
        return selected_rows(d_sums, ctx.order, ctx.each), None, None, None


@kernel(lambda gate_and_up, *_: gate_and_up.like((gate_and_up.shape[0], gate_and_up.shape[2])), fused=True)
def weighted_swiglu(gate_and_up, weights):
    """Return ``silu(gate) · up · weight``, [R, N]. ``gate_and_up``: [R, 2, N]; ``weights``: [R, 1]."""
    gate, up = gate_and_up.unbind(-2)
    return (F.silu(gate) * up * weights).to(gate_and_up.dtype)


@kernel(lambda d_out, gate_and_up, weights: (gate_and_up.like(), weights.like()), fused=True)
def weighted_swiglu_gradients(d_out, gate_and_up, weights):
    """Return the gradients of both arguments of ``weighted_swiglu``; N is summed locally."""
    gate, up = gate_and_up.unbind(-2)
    activated = F.silu(gate)
    d_weights = (d_out * activated * up).sum(-1, keepdim=True, dtype=weights.dtype)
    d_product = (d_out * weights).to(d_out.dtype)
    d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
    return torch.stack((d_gate, d_product * activated), -2), d_weights


class WeightedSwigluFunction(KernelFunction):
    """``silu(gate) · up · weight``."""

    output, gradient = weighted_swiglu, weighted_swiglu_gradients


class _Order(NamedTuple):
    """The order of rows by experts, its inverse, and the number of rows of each expert."""

    order: Tensor
    place: Tensor
    rows: Tensor


class _Transfer(NamedTuple):
    """Numbers of rows that this rank sends to each rank of z and receives from it, and the order of received rows."""

    sent: Sequence[int]
    received: Sequence[int]
    order: _Order


@dataclass(frozen=True)
class ExpertsSpec(LayerSpec):
    """Gated MLPs with SiLU. Each token uses the experts in its ``Routing``: [T, H over y] → [T, H over y].

    The weight of all experts is [experts over z, in, out]: y splits the input features of the first product and x its
    output features, as for a linear layer. Nothing is gathered over z. A token's output is the sum of its experts'
    outputs, each multiplied by its weight, in the order of its choices.

    Attributes:
        hidden: features of the residual stream.
        inner: features within an expert.
        experts: number of experts; z divides it.
        std: standard deviation of the initial weights of the first product.
        down_std: standard deviation of the initial weights of the second product.
    """

    hidden: int
    inner: int
    experts: int
    std: float = 0.02
    down_std: float = 0.02

    def parameters(self) -> dict[str, ParameterSpec]:
        up = (self.experts, self.hidden, 2, self.inner)
        down = (self.experts, self.inner, self.hidden)
        each = partial(ParameterSpec, group="matrices", streamed=True, local=True)
        return {
            "up": each(up, Layout(("z",), ("y",), (), ("x",)), std=self.std, matrices=Matrices(3, (0, 2))),
            "down": each(down, Layout(("z",), ("x",), ("y",)), std=self.down_std, matrices=Matrices(2, (0,))),
        }

    async def forward(
        self, layer: BoundLayer, x_TH: Tensor, routing: Routing, other: Coroutine[Any, Any, Tensor] | None = None
    ) -> Tensor:
        """Return the output. ``other`` is another layer, which computes while rows travel; its output is added."""
        weights, grid = layer.weights, layer.context.grid
        x, y, alone, ranks = grid.x, grid.y, grid.axis(None), layer.context.expert_axis
        current = layer.current_pass
        splits = current.splits_tokens
        weights_TK, experts_TK = routing
        if x.size > 1:
            arriving = start_gather(experts_TK, x, TOKENS) if splits else Pending(experts_TK)
            inputs = (x_TH, summed_gradient(x, splits)), (weights_TK, summed_gradient(x, splits))
            x_TH, weights_TK = await exchanged(*inputs)
            experts_TK = arriving.wait()
        each = experts_TK.shape[1]
        sent = _Order(*in_expert_order(experts_TK, self.experts))
        transfer = self._transfer(layer, sent) if ranks.size > 1 else None
        rows = SelectedRowsFunction.apply(x_TH, sent.order, sent.place, each)
        row_weights = SelectedRowsFunction.apply(weights_TK.flatten().unsqueeze(1), sent.order, sent.place, 1)
        del x_TH, weights_TK
        own, travelling = sent, None
        # Gradients of weights, which the backward computes while it sends the gradients of rows back.
        later: list[Callable[[], None]] | None = [] if transfer and rows.grad_fn is not None else None
        if transfer:
            travelling = Exchanges(
                (rows, all_to_all(ranks, transfer.sent, transfer.received, later)),
                (row_weights, all_to_all(ranks, transfer.sent, transfer.received)),
            )
        added_TH = None if other is None else await other
        if transfer and travelling:
            rows, row_weights = await travelling.received()
            own = transfer.order
            rows = SelectedRowsFunction.apply(rows, own.order, own.place, 1)
            row_weights = SelectedRowsFunction.apply(row_weights, own.order, own.place, 1)
        products = GroupedMatmul(own.rows)
        first = ProductContext(weights, products, y, alone, later=later)
        gate_and_up = await multiply(rows, layer.up, None, first, current)
        del rows
        act = _activated(current, gate_and_up, row_weights)
        del gate_and_up, row_weights
        second = ProductContext(weights, products, alone, y, transposed=True, later=later)
        out = await multiply(act, layer.down, None, second, current)
        if transfer:
            out = SelectedRowsFunction.apply(out, own.place, own.order, 1)
            (out,) = await exchanged((out, all_to_all(ranks, transfer.received, transfer.sent)))
        out_TH = SummedRowsFunction.apply(out, sent.order, sent.place, each)
        if x.size > 1:
            (out_TH,) = await exchanged((out_TH, summed(x, splits)))
        return out_TH if added_TH is None else out_TH + added_TH

    def _transfer(self, layer: BoundLayer, sent: _Order) -> _Transfer:
        """Exchange the numbers of rows of all experts. The host waits for them, because they determine shapes.

        The chunk does not yield, so its rows are sent while the remaining chunks compute.
        """
        axis = layer.context.expert_axis
        own = self.experts // axis.size
        rows_of_ranks = axis.start_all_to_all(sent.rows, [own] * axis.size, [own] * axis.size).wait()
        sent_rows, received_rows = rows_per_rank(sent, rows_of_ranks, axis.size)
        experts = experts_of_rows(rows_of_ranks, axis.size, sum(received_rows))
        return _Transfer(sent_rows, received_rows, _Order(*in_expert_order(experts, own)))


def rows_per_rank(sent: Any, rows_of_ranks: Any, ranks: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to each rank and receives from it, on the host."""
    if isinstance(rows_of_ranks, Symbolic):
        total, device = sent.order.shape[0], rows_of_ranks.device
        return equal_shares(total, ranks), equal_shares(round(total * device.imbalance), ranks)
    sent_rows, received_rows = sent.rows, rows_of_ranks
    both = sent_rows.new_empty((2, ranks))
    for row, counts in zip(both, (sent_rows, received_rows), strict=True):
        row.copy_(counts.view(ranks, -1).sum(1))
    first, second = both.tolist()
    return first, second


def equal_shares(total: int, ranks: int) -> list[int]:
    """Return near-equal numbers of rows of ``ranks`` ranks."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _activated(current: Pass, gate_and_up: Tensor, row_weights: Tensor) -> Input:
    """Return the input of the second product, which is recomputed if products do not keep such inputs."""
    act = WeightedSwigluFunction.apply(gate_and_up, row_weights)
    if not current.recompute_inputs:
        return act
    saved = gate_and_up.detach(), row_weights.detach()
    return Recomputable(act, lambda: weighted_swiglu(*saved))
