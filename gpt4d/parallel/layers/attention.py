"""The core of causal self-attention: its heads are split over x, so no rank needs another's."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import random
from gpt4d.parallel.grid import Axis


class CausalAttention(nn.Module):
    """Queries, keys and values [batch, sequence, 3, heads·size over x] → [batch, sequence, heads·size over x].

    Without dropout of the attention weights it is torch's fused kernel; with it the weights are written out, because
    the mask must be that of the global heads and samples.
    """

    def __init__(self, heads: int, dropout: float, axis: Axis):
        super().__init__()
        self.heads, self.dropout, self.axis, self.key = heads // axis.size, dropout, axis, 0

    def forward(
        self, qkv: torch.Tensor, sample_ids: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``documents`` [batch, sequence]: each token sees only those with its number."""
        seen = None if documents is None else _seen(documents)
        q, k, v = qkv.unflatten(-1, (self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, size]
        if self.training and self.dropout > 0:
            mixed = self._with_dropout(q, k, v, sample_ids, seen)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return mixed.transpose(1, 2).flatten(2)

    def _with_dropout(self, q, k, v, sample_ids, seen):
        length, device = q.shape[-2], q.device
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if seen is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        first = self.axis.index * self.heads
        rows = random.fold(self.key, sample_ids)[:, None]
        rows = random.fold(rows, torch.arange(first, first + self.heads, device=device))[..., None]
        rows = random.fold(rows, torch.arange(length, device=device))
        keep = random.keep_mask(rows, length, 0, self.dropout)
        return torch.where(keep, weights / (1 - self.dropout), 0) @ v


def _seen(documents: torch.Tensor) -> torch.Tensor:
    """Which tokens [batch, 1, from, to] see which: those before them, and themselves, of the same document."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()
