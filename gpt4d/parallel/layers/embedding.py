"""Token and position embeddings: vocabulary over x (and, as stored, over z), hidden over y."""

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.layers import specs
from gpt4d.parallel.weights import WeightStream


class LookupFunction(torch.autograd.Function):
    """Rows of a table of which each rank of x holds a contiguous range; rows of other ranks are zero before the sum."""

    @staticmethod
    def forward(ctx, weight, ids, weights: WeightStream):
        table, axis = weights.gather(weight), weights.grid.x
        local = ids - axis.index * len(table)
        elsewhere = (local < 0) | (local >= len(table))
        local = local.masked_fill_(elsewhere, 0)
        rows = F.embedding(local, table)
        if axis.size > 1:
            rows.masked_fill_(elsewhere.unsqueeze(-1), 0)
        ctx.save_for_backward(local, elsewhere)
        ctx.weight, ctx.weights, ctx.rows = weight, weights, len(table)
        return collectives.all_reduce(rows, axis, parameter=weight)

    @staticmethod
    def backward(ctx, d_rows):
        local, elsewhere = ctx.saved_tensors
        # Each rank of x has the full gradient of the sum, including that of its own rows. It adds them up in the
        # master's dtype, since the row of a frequent token is a sum of thousands.
        d_rows = d_rows.to(ctx.weight.dtype).masked_fill(elsewhere.unsqueeze(-1), 0)
        d_table = d_rows.new_zeros(ctx.rows, d_rows.shape[-1])
        d_table.index_add_(0, local.flatten(), d_rows.flatten(0, -2))
        ctx.weights.scatter(ctx.weight, d_table)
        return None, None, None


class TokenEmbedding(nn.Module):
    """Token ids [batch, sequence] → [batch, sequence, hidden over y], in the compute dtype.

    ``rows`` is the padded vocabulary. Padding is never looked up, and the loss leaves it out.
    """

    def __init__(self, weights: WeightStream, rows: int, hidden: int, std: float = 0.02):
        super().__init__()
        self.weights = weights
        self.weight = weights.parameter(specs.token_embedding(rows, hidden, std)["weight"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return LookupFunction.apply(self.weight, ids, self.weights)


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
    """Learned vectors of positions, in the compute dtype: [batch, length, hidden over y].

    The positions are 0 … length-1. With ``documents`` [batch, length], the index of each token's document, they restart
    at 0 in every document.
    """

    def __init__(self, weights: WeightStream, positions: int, hidden: int, std: float = 0.02):
        super().__init__()
        self.dtype = weights.compute_dtype
        self.weight = weights.parameter(specs.position_embedding(positions, hidden, std)["weight"])

    def forward(self, batch: int, length: int, documents: torch.Tensor | None = None) -> torch.Tensor:
        if documents is None:
            return ExpandFunction.apply(self.weight, batch, length, self.dtype)
        places = torch.arange(length, device=documents.device).expand_as(documents)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        first = torch.where(begins, places, 0).cummax(1).values
        return F.embedding(places - first, self.weight).to(self.dtype)
