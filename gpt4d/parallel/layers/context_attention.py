"""Causal attention of sequences that several ranks share (``parallel.context``).

Shapes: C: ranks that share sequences; B: sequences; S: positions of a sequence; L: positions of a segment, S/(2·C);
h: this rank's query heads; g: its key-value heads; s: size of a head.

A rank has segments ``index`` and 2·C - 1 - ``index`` of each sequence, in this order, so all ranks have equal work. The
attention of its 2·L queries has steps: first to the rank's own keys, and then to the keys of other ranks. Keys and
values of a step arrive during the previous step (``SharedKeys``). Results of blocks are combined by their log-sum-exp,
as in ring attention (Liu et al., 2023).

The backward receives keys and values again, and sends their gradients. The backward of the next attention starts to
receive the keys of the first step, so that they overlap with the backward of the layers in between. Then a rank
computes the gradients of its own keys last, and the last collective of gradients overlaps with them. The first
attention of a backward starts to receive keys itself. It computes the gradients of its own keys first, during the
collective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt4d.parallel.comm.pending import MeshAxis, Pending
from gpt4d.parallel.engine.interleave import YieldPoint
from gpt4d.parallel.kernels import Function, Tensor, kernel, wide_dtype
from gpt4d.parallel.layers.attention_backends import takes_documents, with_heads
from gpt4d.parallel.layers.exchange import SentFunction, exchanged
from gpt4d.parallel.layers.heads import StackedFunction
from gpt4d.parallel.layers.product import cast, placeholder
from gpt4d.parallel.layers.sequence import Documents, segments_of
from gpt4d.parallel.lazy import torch


class KeyBlock(NamedTuple):
    """Queries of a rank that attend to a range of keys. With ``causal``, these are equally many.

    ``first`` and ``stop`` are indices among the 2·L queries of the rank, ``first_key`` and ``stop_key`` among the keys.
    """

    first: int
    stop: int
    first_key: int
    stop_key: int
    causal: bool = False


# Blocks of the queries with the keys of one step, and their masks or None. The first block of a query has a key for it.
Step = list[tuple[KeyBlock, Any]]
# A block and the gradients of its keys and of its values.
BlockGradients = tuple[KeyBlock, Tensor, Tensor]


@kernel(lambda gathered, ranks: gathered.like((2, gathered.shape[1], ranks * gathered.shape[2], *gathered.shape[3:])))
def in_sequence_order(gathered, ranks: int):
    """Return keys and values [2, B, S, g, s] from their all-gathered segments [C · 2, B, 2·L, g, s]."""
    parts = gathered.unflatten(0, (ranks, 2)).unflatten(3, (2, -1))  # [C, 2, B, 2, L, g, s]
    early, late = parts.permute(3, 1, 2, 0, 4, 5, 6)  # each [2, B, C, L, g, s]
    return torch.cat((early, late.flip(2)), 2).flatten(2, 3)


@kernel(lambda d_keys, ranks: d_keys.like((2 * ranks, d_keys.shape[1], d_keys.shape[2] // ranks, *d_keys.shape[3:])))
def in_rank_order(d_keys, ranks: int):
    """Return gradients [2, B, S, g, s] as [C · 2, B, 2·L, g, s], the inverse of ``in_sequence_order``."""
    early, late = d_keys.unflatten(2, (2, ranks, -1)).unbind(2)  # each [2, B, C, L, g, s]
    return torch.stack((early, late.flip(2)), 3).permute(2, 0, 1, 3, 4, 5, 6).flatten(3, 4).flatten(0, 1)


@kernel(lambda like: like.like())
def no_gradient(like):
    """Return zeros in the shape of a tensor."""
    return torch.zeros_like(like)


@kernel(lambda total, *_: total, moved=lambda total, part, first: 3 * part.nbytes)
def add_places_(total, part, first: int):
    """Add ``part`` [B, n, …] to the n places of ``total`` that begin with ``first``, in place."""
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


def _executed_flops(q, block: KeyBlock) -> float:
    """Return the FLOPs that torch's kernels execute: half of a causal block's."""
    batch, _, heads, size = q.shape
    flops = 4 * batch * heads * size * (block.stop - block.first) * (block.stop_key - block.first_key)
    return flops / (2 if block.causal else 1)


def _attention_flops(q, mask, block: KeyBlock) -> float:
    """Return the FLOPs of products with all keys. Without masks, the blocks have half of all pairs of tokens."""
    return _executed_flops(q, block) * (2 if mask is None else 1)


def _block_attention_results(q, k, v, mask, block: KeyBlock, scale: float | None):
    batch, _, heads, size = q.shape
    count = block.stop - block.first
    return q.like((batch, count, heads, size)), q.like((batch, heads, count), wide_dtype(q))


@kernel(
    _block_attention_results,
    flops=lambda q, k, v, mask, block, scale: _attention_flops(q, mask, block),
    attention=lambda q, k, v, mask, block, scale: _executed_flops(q, block),
)
def block_attention(q, k, v, mask, block: KeyBlock, scale: float | None):
    """Return the output [B, n, h, s] of the queries of a block and the log-sum-exp of their scores, [B, h, n].

    Queries without a key have zeros and -inf. ``mask``: additive, [B or 1, 1, n, keys], or None.
    """
    q, k, v = _in_block(q, k, v, block)
    if takes_documents(q) and not isinstance(mask, torch.Tensor):
        return _flash_attention(q, k, v, mask, block.causal, scale)
    if q.is_cpu:
        out, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
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


def _block_gradients_results(d_out, q, k, v, out, statistics, mask, block: KeyBlock, scale: float | None):
    count, keys = block.stop - block.first, (k.shape[0], block.stop_key - block.first_key, *k.shape[2:])
    return q.like((q.shape[0], count, *q.shape[2:])), k.like(keys), k.like(keys)


@kernel(
    _block_gradients_results,
    flops=lambda d_out, q, k, v, out, statistics, mask, block, scale: 2.5 * _attention_flops(q, mask, block),
    attention=lambda d_out, q, k, v, out, statistics, mask, block, scale: 2.5 * _executed_flops(q, block),
)
def block_gradients(d_out, q, k, v, out, statistics, mask, block: KeyBlock, scale: float | None):
    """Return the gradients of the queries and of the keys and values of a block. The kernel recomputes the scores.

    ``out`` and ``statistics`` are the combined results of all blocks.
    """
    q, k, v = _in_block(q, k, v, block)
    places = slice(block.first, block.stop)
    d_out, out, statistics = d_out[:, places], out[:, places], statistics[..., places]
    if takes_documents(q) and not isinstance(mask, torch.Tensor):
        return _flash_gradients(d_out, q, k, v, out, statistics, mask, block.causal, scale)
    d_out, q, k, v, out = _heads_first(d_out, q, k, v, out)
    if q.is_cpu:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
        out, statistics, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, causal, False, scale=scale
        )
        return out, statistics
    out, statistics, *_ = torch.ops.aten._flash_attention_forward(
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
        return torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, statistics.contiguous(), None, None, *lengths, 0.0, causal, state, unused, scale=scale
        )
    found = torch.ops.aten._flash_attention_backward(
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


def _in_block(q, k, v, block: KeyBlock):
    """Return the queries, keys and values of a block, [B, n, heads, s]."""
    return q[:, block.first : block.stop], *(x[:, block.first_key : block.stop_key] for x in (k, v))


def _heads_first(*tensors):
    """Return [B, n, heads, s] as [B, heads, n, s]."""
    return (x.transpose(1, 2) for x in tensors)


def _for_queries(x, q):
    """Return keys or values [B, g, n, s] with each head repeated for its query heads."""
    return with_heads(x.transpose(1, 2), q.shape[1]).transpose(1, 2)


def _scores(q, k, mask, causal: bool, scale: float | None):
    """Return scaled and masked scores [B, h, queries, keys], at least in float32."""
    found = (q @ _for_queries(k, q).transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    found = found * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        found = found.masked_fill_(later, -math.inf)
    return found if mask is None else found + mask


def _combined_bytes(out, statistics, more, more_statistics, first: int) -> int:
    return 2 * out.itemsize * math.prod(more.shape) + more.nbytes + 3 * more_statistics.nbytes


@kernel(lambda out, *_: out, moved=_combined_bytes)
def combine_(out, statistics, more, more_statistics, first: int):
    """Combine the results of a block, whose queries begin with ``first``, with the results of earlier blocks in place.

    ``out`` has the dtype of ``statistics``. Each query has a key in one of the blocks so far.
    """
    places = slice(first, first + more.shape[1])
    before = statistics[..., places]
    total = torch.logaddexp(before, more_statistics)
    old, new = ((part - total).exp().transpose(1, 2)[..., None] for part in (before, more_statistics))
    out[:, places] = out[:, places] * old + more * new
    statistics[..., places] = total
    return out


def _segment_mask_results(q, documents, first: int, first_key: int, stop_key: int, window: int | None):
    if not q.is_cpu and q.itemsize == 2:
        return q.like((2, q.shape[0] + 1), "int32")
    return q.like((1, 1, q.shape[1] // 2, stop_key - first_key))


@kernel(_segment_mask_results, unread=("q",))
def segment_mask(q, documents, first: int, first_key: int, stop_key: int, window: int | None):
    """Return 0 for each key that a query attends to and -inf for other keys, [B or 1, 1, L, keys].

    On a GPU with variable-length attention, return the lengths of documents in place of a mask.

    Args:
        q: queries [B, 2·L, h, s], whose dtype the mask has.
        documents: documents of the complete sequences, to which attention is restricted; None: no limit.
        first: position of the first query of the segment.
        first_key: position of the first key.
        stop_key: position after the last key.
        window: as for ``AttentionSpec``.
    """
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


@kernel(lambda q, documents, ranks, *_: q.like((1, 1, q.shape[1], ranks * q.shape[1]), "bool"), unread=("q",))
def segments_mask(q, documents, ranks: int, index: int):
    """Return True for each key that a query of this rank attends to, [B or 1, 1, 2·L, S]."""
    length = q.shape[1] // 2
    keys = 2 * ranks * length
    masks = [_hidden(q, documents, segment * length, 0, keys, None) for segment in segments_of(ranks, index)]
    return ~torch.cat(masks, 2)


class SharedKeys(ABC):
    """The keys and values of one call on the ranks of ``axis``: collectives that one node starts and another ends.

    They arrive in steps as [2, B, n, g, s]. Step 0 has this rank's own keys and values.

    Attributes:
        own: gradients of this rank's keys and values from its own queries.
        gradient: collective in flight that adds the gradients from all ranks' queries.
    """

    def __init__(self, axis: MeshAxis):
        self.axis = axis
        self.own: list[BlockGradients] = []
        self.gradient: Any = None

    @abstractmethod
    def steps(self, q: Tensor) -> list[Step]:
        """Return the blocks of all steps for causal attention. ``q``: queries [B, 2·L, h, s]."""

    @abstractmethod
    def masked_steps(self, q: Tensor, documents: Documents | None, window: int | None) -> list[Step]:
        """Return the blocks of all steps with their masks. ``documents`` and ``window`` as for ``segment_mask``."""

    @abstractmethod
    def start(self, sent: Tensor) -> Pending:
        """Start to receive the keys and values of the step after the step with the keys ``sent``."""

    @abstractmethod
    def add_gradients(self, keys: Tensor, found: list[BlockGradients]) -> None:
        """Add the gradients of keys and values that a step has received, and start to send the sums."""

    def take_gradient(self) -> Tensor:
        """Wait for the gradient of this rank's keys and values, [2, B, 2·L, g, s]."""
        (pending, own), self.gradient, self.own = (self.gradient, self.own), None, []
        return add_blocks_(pending.wait(), own)

    @property
    def segments(self) -> tuple[int, int]:
        """This rank's segments."""
        return segments_of(self.axis.size, self.axis.index)


def add_blocks_(total: Tensor, found: list[BlockGradients]) -> Tensor:
    """Add gradients of keys and values of some blocks to ``total`` [2, B, n, g, s] in place."""
    for block, *gradients in found:
        for part, gradient in zip(total.unbind(), gradients, strict=True):
            add_places_(part, gradient, block.first_key)
    return total


class GatheredKeys(SharedKeys):
    """One step receives the all-gathered keys and values [2, B, S, g, s]; their gradients are reduce-scattered."""

    def steps(self, q: Tensor) -> list[Step]:
        length, (early, late) = q.shape[1] // 2, self.segments
        before = KeyBlock(0, 2 * length, 0, early * length)
        between = KeyBlock(length, 2 * length, (early + 1) * length, late * length)
        return [[(own_block(q), None)], [(b, None) for b in (before, between) if b.first_key < b.stop_key]]

    def masked_steps(self, q: Tensor, documents: Documents | None, window: int | None) -> list[Step]:
        length, blocks = q.shape[1] // 2, []
        for place, segment in enumerate(self.segments):
            first, stop_key = segment * length, (segment + 1) * length
            first_key = 0 if window is None else max(0, first - window + 1)
            mask = segment_mask(q, documents, first, first_key, stop_key, window)
            blocks.append((KeyBlock(place * length, (place + 1) * length, first_key, stop_key), mask))
        return [[], blocks]

    def start(self, sent: Tensor) -> Pending:
        return self.axis.start_all_gather(sent).then(lambda gathered: in_sequence_order(gathered, self.axis.size))

    def add_gradients(self, keys: Tensor, found: list[BlockGradients]) -> None:
        self.start_gradient(add_blocks_(no_gradient(keys), found))

    def start_gradient(self, d_received: Tensor) -> None:
        """Start to reduce-scatter the gradients [2, B, S, g, s]."""
        self.gradient = self.axis.start_reduce_scatter(in_rank_order(d_received, self.axis.size))


class RingKeys(SharedKeys):
    """Each step receives the keys and values [2, B, 2·L, g, s] of one rank from the previous rank of the axis.

    The gradients follow them around the ring. So a rank has keys and values of two other ranks at most.
    """

    def steps(self, q: Tensor) -> list[Step]:
        length = q.shape[1] // 2
        earlier, later = KeyBlock(0, 2 * length, 0, length), KeyBlock(length, 2 * length, 0, 2 * length)
        ranks = [self._rank(step) for step in range(1, self.axis.size)]
        return [[(own_block(q), None)], *[[(earlier if rank < self.axis.index else later, None)] for rank in ranks]]

    def masked_steps(self, q: Tensor, documents: Documents | None, window: int | None) -> list[Step]:
        length = q.shape[1] // 2

        def blocks(rank: int) -> Iterator[tuple[KeyBlock, Any]]:
            for place, segment in enumerate(self.segments):
                reach = 0 if window is None else segment * length - window + 1
                # Reversed: in its first block, a query attends to itself.
                for key_place, other in reversed([*enumerate(segments_of(self.axis.size, rank))]):
                    stop_key = (other + 1) * length
                    if other <= segment and stop_key > reach:
                        ranges = (at * length for at in (place, place + 1, key_place, key_place + 1))
                        mask = segment_mask(q, documents, segment * length, other * length, stop_key, window)
                        yield KeyBlock(*ranges), mask  # type: ignore[arg-type]

        return [[*blocks(self._rank(step))] for step in range(self.axis.size)]

    def start(self, sent: Tensor) -> Pending:
        return self.axis.start_shift(sent)

    def add_gradients(self, keys: Tensor, found: list[BlockGradients]) -> None:
        earlier = no_gradient(keys) if self.gradient is None else self.gradient.wait()
        self.gradient = self.axis.start_shift(add_blocks_(earlier, found))

    def _rank(self, step: int) -> int:
        """Return the index of the rank whose keys and values a step has."""
        return (self.axis.index - step) % self.axis.size


def own_block(q: Tensor) -> KeyBlock:
    """Return the block of all queries with the keys of the same tokens."""
    return KeyBlock(0, q.shape[1], 0, q.shape[1], causal=True)


async def gathered_keys(k: Tensor, v: Tensor, axis: MeshAxis) -> tuple[Tensor, ...]:
    """Return the keys and values [B, S, g, s] of complete sequences. The backward reduce-scatters their gradients."""
    (gathered,) = await exchanged((StackedFunction.apply(k, v), GatheredKeys(axis)))
    return gathered.unbind()


class ShardFunction(SentFunction):
    """This rank's keys and values, with which the attention also computes."""

    @staticmethod
    def forward(ctx, sent, exchange):
        ctx.exchange = exchange
        return sent.view_as(sent)


class SharedAttentionFunction(Function):
    """Attention of queries [B, 2·L, h, s] to the keys of complete sequences, whose output is already computed."""

    @staticmethod
    def forward(ctx, q, shard, call: SharedAttention):
        (out, *others), call.results = call.results, None
        ctx.save_for_backward(q, shard, out, *others)
        ctx.call = call
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out):
        return *ctx.call.gradients(d_out, *ctx.saved_tensors), None


@dataclass(eq=False)
class SharedAttention:
    """One call of attention on sequences that several ranks share.

    Attributes:
        shared: keys and values.
        steps: blocks of the queries with the keys and values of each step.
        scale: as for ``AttentionSpec``.
        recomputed: the backward recomputes this call. It uses the received keys and values again if they arrive in one
            step.
        calls: the calls on the same tokens that will have a backward, in their order; None if the backward starts to
            receive keys and values when it needs them.
    """

    shared: SharedKeys
    steps: list[Step]
    scale: float | None
    recomputed: bool
    calls: list[SharedAttention] | None = None
    results: Any = None  # tensors that the backward uses: output, statistics, and received keys and values
    keys: Any = None  # this rank's keys and values, until the backward
    received: Pending | None = None  # keys and values of the backward's first step, in flight

    async def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output [B, 2·L, h, s]."""
        shard = ShardFunction.apply(StackedFunction.apply(k, v), self)
        queries, keys, results = q.detach(), shard.detach(), None
        if self.calls is not None:
            self.keys = keys
            self.calls.append(self)
        for step in self.steps:
            pending = None if step is self.steps[-1] else self.shared.start(keys)
            for block, mask in step:
                results = self._add(results, queries, keys, block, mask)
            if pending is not None:
                await YieldPoint()
                keys = pending.wait()
        assert results is not None
        out, statistics = results
        again = (keys,) if self.recomputed and len(self.steps) == 2 else ()
        self.results = cast(out, queries), statistics, *again
        return SharedAttentionFunction.apply(q, shard, self)

    def gradients(self, d_out: Tensor, q: Tensor, shard: Tensor, out: Tensor, statistics: Tensor, *received: Tensor):
        """Return the gradients of queries and, as a placeholder, of keys and values, which ``shared`` sends."""
        d_queries, pending = None, None if received else self._take_keys()

        def gradients_of(step: Step, keys: Tensor) -> list[BlockGradients]:
            nonlocal d_queries
            found = []
            for block, mask in step:
                d_block, *d_keys = block_gradients(d_out, q, *keys.unbind(), out, statistics, mask, block, self.scale)
                found.append((block, *d_keys))
                if d_queries is None and block.stop - block.first == q.shape[1]:
                    d_queries = d_block
                else:
                    d_queries = add_places_(no_gradient(q) if d_queries is None else d_queries, d_block, block.first)
            return found

        own, *others = self.steps
        own_first = pending is None and not received
        if own_first:
            pending = self.shared.start(shard)
            self.shared.own = gradients_of(own, shard)
        for step in others:
            keys = received[0] if pending is None else pending.wait()
            pending = None if step is others[-1] else self.shared.start(keys)
            self.shared.add_gradients(keys, gradients_of(step, keys))
        del keys  # not needed for the gradients of own keys
        if not own_first:
            self.shared.own = gradients_of(own, shard)
        return d_queries, placeholder(shard, shard.shape)

    def take_gradient(self) -> Tensor:
        """Wait for the gradient of this rank's keys and values. Then start the backward of the call before."""
        gradient = self.shared.take_gradient()
        if self.calls:
            before = self.calls[-1]
            before.received = before.shared.start(before.keys)
        return gradient

    def _take_keys(self) -> Pending | None:
        """Return the keys and values of the backward's first step if they are in flight."""
        if self.calls is not None:
            last = self.calls.pop()
            assert last is self, "the backward of attention has another order than the forward"
        pending, self.received, self.keys = self.received, None, None
        return pending

    def _add(self, results: Any, q: Tensor, keys: Tensor, block: KeyBlock, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the results of a block, combined with earlier results in the dtype of the statistics."""
        out, statistics = block_attention(q, *keys.unbind(), mask, block, self.scale)
        if results is None and block.stop - block.first == q.shape[1]:
            return cast(out, statistics), statistics
        if results is None:
            results = no_results(q, statistics)
        combine_(*results, out, statistics, block.first)
        return results


@kernel(lambda q, statistics: (q.like(dtype=statistics.dtype), statistics.like((q.shape[0], q.shape[2], q.shape[1]))))
def no_results(q, statistics):
    """Return the results of queries that have not attended to any key: zeros, and a log-sum-exp of -inf."""
    batch, length, heads, _ = q.shape
    return torch.zeros_like(q, dtype=statistics.dtype), statistics.new_full((batch, heads, length), -math.inf)
