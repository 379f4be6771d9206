"""The core of self-attention. Axes of the grid split the heads, so no rank needs another rank's."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import random
from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.layers.dropout import DropoutFunction
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.weights import WeightStream


def head_split(heads: int, weights: WeightStream, stream: str = "y") -> list[Axis]:
    """Return the axes that split the heads, outermost first.

    ``stream`` is the axis that splits the features of the residual stream. Where it splits the heads too (ATP paper,
    §3.2), no rank repeats another's attention: the product before scatters its output, instead of summing it whole on
    all ranks, and the one after gathers its input.
    """
    return [weights.grid[name] for name in weights.head_axes(heads, stream)]


def local_heads(heads: int, axes: Sequence[Axis]) -> tuple[int, int]:
    """Return the first head of this rank and how many it has, where ``axes``, outermost first, split them."""
    first = 0
    for axis in axes:
        heads //= axis.size
        first += axis.index * heads
    return first, heads


def _takes_documents(q: torch.Tensor) -> bool:
    """Return whether torch's kernel of flash attention takes documents of such queries, each with its own length."""
    if q.device.type != "cuda" or torch.version.hip or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    # Some GPUs compute no gradients of larger heads.
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 192 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attention_of_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the attended values, [tokens, heads, size], of [sequences, length, heads, size] with documents inside.

    ``starts``: as ``Documents.starts``. No document is longer than a sequence.
    """
    from torch.nn.attention.varlen import varlen_attn  # its import takes two seconds

    longest, causal = q.shape[1], (-1, 0)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    attended = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=causal)
    assert isinstance(attended, torch.Tensor)  # not a pair: nothing else has been asked for
    return attended


class AttentionCore(nn.Module):
    """Attention of heads over ``axes``, outermost first: queries, keys, values → [tokens, heads·size].

    Without dropout of the attention weights it uses torch's fused kernels; for documents on an NVIDIA GPU the one that
    takes their lengths and computes nothing between them. With dropout the weights are computed explicitly, because the
    dropout mask must be that of the global heads and samples. ``causal`` false: a token attends to all tokens of its
    sample, as pixels do.
    """

    def __init__(self, heads: int, dropout: float, axes: Sequence[Axis], causal: bool = True):
        super().__init__()
        self.causal = causal
        self.first_head, self.heads = local_heads(heads, axes)
        self.dropout, self.key = dropout, 0

    def of_fused(self, qkv: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return the attended values of each token, of queries, keys and values [tokens, 3, heads·size]."""
        qkv = qkv.unflatten(0, (-1, tokens.length)).unflatten(-1, (self.heads, -1))
        return self(*qkv.unbind(2), tokens)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return the attended values of each token.

        Args:
            q: queries [batch, sequence, heads here, size].
            k: keys [batch, sequence, heads, size]. If there are fewer of them, each serves equally many queries.
            v: values, shaped as ``k``.
            tokens: where they come from.
        """
        documents, drops, mask = tokens.documents, self.training and self.dropout > 0, None
        assert documents is None or (self.causal and tokens.cache is None), "documents limit causal training only"
        if tokens.cache is not None:
            (k, v), mask = tokens.cache.extend(self, k, v), tokens.cache.mask
        if k.shape[2] != self.heads:
            k, v = (x.repeat_interleave(self.heads // x.shape[2], 2) for x in (k, v))
        if documents is not None:
            if not drops and _takes_documents(q):
                return _attention_of_documents(q, k, v, documents.starts).flatten(1)
            mask = documents.mask
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if drops:
            mixed = self._with_dropout(q, k, v, tokens.sample_ids, mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

    def _with_dropout(self, q, k, v, sample_ids, mask):
        length, device = q.shape[-2], q.device
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            if mask is None:
                mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        heads = torch.arange(self.first_head, self.first_head + self.heads, device=device)
        rows = random.fold(random.fold(self.key, sample_ids)[:, None], heads)[..., None]
        rows = random.fold(rows, torch.arange(length, device=device))
        return DropoutFunction.apply(weights, rows, 0, self.dropout) @ v
