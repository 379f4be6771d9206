"""Token and position embeddings: vocabulary over x (and, as stored, over z), hidden over y."""

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.weights import WeightStream


class LookupFunction(torch.autograd.Function):
    """Rows of a table of which each rank of x holds a contiguous range; rows of other ranks are zero before the sum."""

    @staticmethod
    def forward(ctx, weight, ids, weights: WeightStream, scatter: bool):
        table, axis = weights.gather(weight), weights.grid.x
        local = ids - axis.index * len(table)
        elsewhere = (local < 0) | (local >= len(table))
        local = local.masked_fill_(elsewhere, 0)
        rows = F.embedding(local, table)
        if axis.size > 1:
            rows.masked_fill_(elsewhere.unsqueeze(-1), 0)
        ctx.save_for_backward(local, elsewhere)
        ctx.weight, ctx.weights, ctx.rows, ctx.scatter = weight, weights, len(table), scatter
        combine = axis.reduce_scatter if scatter else axis.all_reduce
        return combine(rows, parameter=weight)

    @staticmethod
    def backward(ctx, d_rows):
        local, elsewhere = ctx.saved_tensors
        if ctx.scatter:
            d_rows = ctx.weights.grid.x.all_gather(d_rows, parameter=ctx.weight)
        # Each rank of x has the full gradient of the sum, including that of its own rows. It adds them up in the
        # master's dtype, since the row of a frequent token is a sum of thousands.
        d_rows = d_rows.to(ctx.weight.dtype).masked_fill(elsewhere.unsqueeze(-1), 0)

        def d_table(earlier: torch.Tensor | None) -> torch.Tensor:
            table = d_rows.new_zeros(ctx.rows, d_rows.shape[-1]) if earlier is None else earlier
            return table.index_add_(0, local.flatten(), d_rows.flatten(0, -2))

        ctx.weights.scatter(ctx.weight, d_table)
        return None, None, None, None


class TokenEmbedding(nn.Module):
    """Token ids [batch, sequence] → [tokens, hidden over y] of this rank's tokens, in the compute dtype.

    ``rows`` is the padded vocabulary, ``used`` the vocabulary. Padding is never looked up, and the loss leaves it out.
    """

    def __init__(self, weights: WeightStream, rows: int, hidden: int, std: float = 0.02, used: int | None = None):
        super().__init__()
        self.weights = weights
        self.weight = weights.parameter(specs.token_embedding(rows, hidden, std, used)["weight"])

    def forward(self, ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return LookupFunction.apply(self.weight, tokens.gathered(ids), self.weights, tokens.axis.size > 1)


class ExpandFunction(torch.autograd.Function):
    """The first rows of a table for every sequence of a batch. Their gradients are summed in the table's dtype."""

    @staticmethod
    def forward(ctx, weight, batch: int, length: int, dtype: torch.dtype):
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return weight[:length].to(dtype).expand(batch, -1, -1)

    @staticmethod
    def backward(ctx, d_rows):
        d_weight = F.pad(d_rows.sum(0, dtype=ctx.dtype), (0, 0, 0, ctx.shape[0] - d_rows.shape[1]))
        return d_weight, None, None, None


class PositionEmbedding(nn.Module):
    """Adds learned vectors of positions to [tokens, hidden over y], in the compute dtype.

    The positions are 0 … length-1. With documents they restart at 0 in every document.
    """

    def __init__(self, weights: WeightStream, positions: int, hidden: int, std: float = 0.02):
        super().__init__()
        self.dtype = weights.compute_dtype
        self.weight = weights.parameter(specs.position_embedding(positions, hidden, std)["weight"])

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if tokens.documents is not None or tokens.cache is not None or tokens.axis.size > 1:
            return x + F.embedding(tokens.local(tokens.positions), self.weight).to(self.dtype)
        rows = ExpandFunction.apply(self.weight, len(tokens.sample_ids), tokens.length, self.dtype)
        return (x.unflatten(0, (-1, tokens.length)) + rows).flatten(0, 1)
