"""The core of causal self-attention. x splits the heads, so no rank needs another rank's."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import random
from gpt4d.parallel.grid import Axis


class CausalAttention(nn.Module):
    """Queries, keys and values [batch, sequence, 3, heads·size over x] → [batch, sequence, heads·size over x].

    Without dropout of the attention weights it uses torch's fused kernel. With dropout the weights are computed
    explicitly, because the dropout mask must be that of the global heads and samples.
    """

    def __init__(self, heads: int, dropout: float, axis: Axis):
        super().__init__()
        self.heads, self.dropout, self.axis, self.key = heads // axis.size, dropout, axis, 0

    def forward(
        self, qkv: torch.Tensor, sample_ids: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attended values. ``documents`` [batch, sequence]: index of the document each token attends to."""
        mask = None if documents is None else document_mask(documents)
        q, k, v = qkv.unflatten(-1, (self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, size]
        if self.training and self.dropout > 0:
            mixed = self._with_dropout(q, k, v, sample_ids, mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return mixed.transpose(1, 2).flatten(2)

    def _with_dropout(self, q, k, v, sample_ids, mask):
        length, device = q.shape[-2], q.device
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        first = self.axis.index * self.heads
        rows = random.fold(self.key, sample_ids)[:, None]
        rows = random.fold(rows, torch.arange(first, first + self.heads, device=device))[..., None]
        rows = random.fold(rows, torch.arange(length, device=device))
        keep = random.keep_mask(rows, length, 0, self.dropout)
        return torch.where(keep, weights / (1 - self.dropout), 0) @ v


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return the boolean mask [batch, 1, query, key]: keys of the same document, up to the query itself."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril_()
