"""The kernels of attention of shared sequences, in torch."""

import math
from typing import NamedTuple

import torch

from gpt4d.parallel.layers.attention_kernels import repeated, takes_documents
from gpt4d.parallel.layers.context_attention import Block
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.sequence import segments_of

aten = torch.ops.aten


def in_sequence_order(gathered, ranks: int):
    """Return keys and values in the order of the sequence: the ranks' first segments, and then their second ones."""
    parts = gathered.unflatten(0, (ranks, 2)).unflatten(3, (2, -1))  # [C, 2, B, 2, L, g, s]
    early, late = parts.permute(3, 1, 2, 0, 4, 5, 6)  # each [2, B, C, L, g, s]
    return torch.cat((early, late.flip(2)), 2).flatten(2, 3)


def in_rank_order(d_keys, ranks: int):
    """Return gradients in the order of the ranks' segments."""
    early, late = d_keys.unflatten(2, (2, ranks, -1)).unbind(2)  # each [2, B, C, L, g, s]
    return torch.stack((early, late.flip(2)), 3).permute(2, 0, 1, 3, 4, 5, 6).flatten(3, 4).flatten(0, 1)


def no_gradient(like):
    """Return zeros."""
    return torch.zeros_like(like)


def add_places_(total, part, first: int):
    """Add a part in place."""
    total[:, first : first + part.shape[1]] += part
    return total


class Packed(NamedTuple):
    """The lengths of documents, for variable-length attention of a segment's queries to a range of keys.

    Attributes:
        queries: offset of the queries of each document in the concatenated queries, and their number.
        keys: offset of the keys of each document in the concatenated keys, and their number.
        causal: the last query of a document has the position of its last key; else all keys are before the queries.
        window: as for ``AttentionSpec``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    causal: bool
    window: int | None


def block_attention(q, k, v, mask: torch.Tensor | Packed | None, block: Block, scale: float | None):
    """Return output and log-sum-exp of a block. ``mask``: as ``segment_mask`` returns it."""
    q, k, v = _in_block(q, k, v, block)
    if takes_documents(q) and not isinstance(mask, torch.Tensor):
        return _flash_attention(q, k, v, mask, block.causal, scale)
    if q.is_cpu:
        out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, block.causal, attn_mask=mask, scale=scale
        )
        if isinstance(mask, torch.Tensor):  # torch's statistics of queries without a key are 0
            statistics = statistics.masked_fill(mask.isneginf().all(-1), -math.inf)
    else:
        q, k, v = _heads_first(q, k, v)
        scores = _scores(q, k, mask, block.causal, scale)
        statistics = scores.logsumexp(-1)
        largest = statistics if mask is None else statistics.masked_fill(statistics == -math.inf, 0)
        out = (scores - largest[..., None]).exp().to(q.dtype) @ _for_queries(v, q)
    return out.transpose(1, 2), statistics


def block_gradients(d_out, q, k, v, out, statistics, mask, block: Block, scale: float | None):
    """Return the gradients of a block. ``mask``: as ``segment_mask`` returns it."""
    q, k, v = _in_block(q, k, v, block)
    places = slice(block.first, block.stop)
    d_out, out, statistics = d_out[:, places], out[:, places], statistics[..., places]
    if takes_documents(q) and not isinstance(mask, torch.Tensor):
        return _flash_gradients(d_out, q, k, v, out, statistics, mask, block.causal, scale)
    d_out, q, k, v, out = _heads_first(d_out, q, k, v, out)
    if q.is_cpu:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, statistics, 0.0, block.causal, attn_mask=mask, scale=scale
        )
    else:
        weights = (_scores(q, k, mask, block.causal, scale) - statistics[..., None]).exp()
        means = (d_out.to(weights.dtype) * out).sum(-1, keepdim=True)
        d_weights = (d_out @ _for_queries(v, q).transpose(-1, -2)).to(weights.dtype)
        d_scores = (weights * (d_weights - means)).to(q.dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
        d_keys, d_values = d_scores.transpose(-1, -2) @ q, weights.to(q.dtype).transpose(-1, -2) @ d_out
        groups = k.shape[1], -1
        found = d_scores @ _for_queries(k, q), *(d.unflatten(1, groups).sum(2) for d in (d_keys, d_values))
    return tuple(x.transpose(1, 2) for x in found)


def _flash_attention(q, k, v, packed: Packed | None, causal: bool, scale: float | None):
    """Return output [B, n, h, s] and log-sum-exp [B, h, n] of FlashAttention on a GPU."""
    batch, lengths = len(q), (q.shape[1], k.shape[1])
    if packed is None:
        out, statistics, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, causal, False, scale=scale
        )
        return out, statistics
    out, statistics, *_ = aten._flash_attention_forward(
        *_concatenated(q, k, v), packed.queries, packed.keys, *lengths, 0.0, packed.causal, False, scale=scale,
        **_limits(packed),
    )  # fmt: skip
    statistics = statistics.masked_fill(statistics == math.inf, -math.inf)  # of queries without a key
    return out.unflatten(0, (batch, -1)), statistics.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def _flash_gradients(d_out, q, k, v, out, statistics, packed: Packed | None, causal: bool, scale: float | None):
    """Return the gradients of ``_flash_attention``. ``out`` and ``statistics`` result from attention to all keys."""
    batch, lengths = len(q), (q.shape[1], k.shape[1])
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of dropout
    if packed is None:
        return aten._flash_attention_backward(
            d_out, q, k, v, out, statistics.contiguous(), None, None, *lengths, 0.0, causal, state, unused, scale=scale
        )
    found = aten._flash_attention_backward(
        *_concatenated(d_out, q, k, v, out), statistics.transpose(0, 1).flatten(1), packed.queries, packed.keys,
        *lengths, 0.0, packed.causal, state, unused, scale=scale, **_limits(packed),
    )  # fmt: skip
    return tuple(x.unflatten(0, (batch, -1)) for x in found)


def _concatenated(*tensors):
    return (x.flatten(0, 1) for x in tensors)


def _limits(packed: Packed) -> dict[str, int]:
    """Return the numbers of keys before and after a query that it attends to; -1: all."""
    left = -1 if packed.window is None else packed.window - 1
    return {"window_size_left": left, "window_size_right": 0 if packed.causal else -1}


def _in_block(q, k, v, block: Block):
    """Return the queries, keys and values of a block, [B, n, heads, s]."""
    return q[:, block.first : block.stop], *(x[:, block.first_key : block.stop_key] for x in (k, v))


def _heads_first(*tensors):
    """Return [B, n, heads, s] as [B, heads, n, s]."""
    return (x.transpose(1, 2) for x in tensors)


def _for_queries(x, q):
    """Return keys or values [B, g, n, s] with each head repeated for its query heads."""
    return x if x.shape[1] == q.shape[1] else repeated(x.transpose(1, 2), q.shape[1] // x.shape[1]).transpose(1, 2)


def _scores(q, k, mask, causal: bool, scale: float | None):
    """Return scaled and masked scores [B, h, queries, keys], at least in float32."""
    found = (q @ _for_queries(k, q).transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    found = found * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        found = found.masked_fill_(later, -math.inf)
    return found if mask is None else found + mask


def combine_(out, statistics, more, more_statistics, first: int):
    """Combine results in place."""
    places = slice(first, first + more.shape[1])
    before = statistics[..., places]
    total = torch.logaddexp(before, more_statistics)
    old, new = ((part - total).exp().transpose(1, 2)[..., None] for part in (before, more_statistics))
    out[:, places] = out[:, places] * old + more * new
    statistics[..., places] = total
    return out


def no_results(q, statistics):
    """Return zeros and -inf."""
    batch, length, heads, _ = q.shape
    return torch.zeros_like(q, dtype=statistics.dtype), statistics.new_full((batch, heads, length), -math.inf)


def segment_mask(q, documents: Documents | None, first: int, first_key: int, stop_key: int, window: int | None):
    """Return the additive mask of a segment; for variable-length attention on a GPU, the lengths of its documents."""
    causal = stop_key > first
    if takes_documents(q) and (causal or window is None):
        return _packed(q, documents, first, first_key, stop_key, causal, window)
    hidden = _hidden(q, documents, first, first_key, stop_key, window)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)


def _hidden(q, documents: Documents | None, first: int, first_key: int, stop_key: int, window: int | None):
    """Return True for the keys that a query does not attend to, [B or 1, 1, L, keys]."""
    rows = torch.arange(first, first + q.shape[1] // 2, device=q.device)[:, None]
    keys = torch.arange(first_key, stop_key, device=q.device)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    if documents is None:
        return hidden[None, None]
    own, others = documents.indices[:, first : first + len(rows)], documents.indices[:, first_key:stop_key]
    return hidden | (own[:, None, :, None] != others[:, None, None])


def _packed(
    q, documents: Documents | None, first: int, first_key: int, stop_key: int, causal: bool, window: int | None
) -> Packed:
    """Return the documents of a segment. Documents before the segment have keys, but no queries."""
    count, length = q.shape[1] // 2, stop_key if documents is None else documents.indices.shape[1]
    if documents is None:
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * length
    else:
        starts = documents.starts
    samples, places = starts // length, starts % length

    def offsets(start: int, stop: int) -> torch.Tensor:
        return samples * (stop - start) + places.clamp(start, stop) - start

    return Packed(offsets(first, first + count), offsets(first_key, stop_key), causal, window)


def segments_mask(q, documents: Documents | None, ranks: int, index: int):
    """Return the boolean mask of both segments of a rank."""
    length = q.shape[1] // 2
    keys = 2 * ranks * length
    masks = [_hidden(q, documents, segment * length, 0, keys, None) for segment in segments_of(ranks, index)]
    return ~torch.cat(masks, 2)
