"""Scaled dot-product attention. Axes of the grid split the heads, so it needs no communication.

Shapes: B: sequences; S: positions; T: tokens of all sequences; h: this rank's heads; s: size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from gpt4d.parallel import random
from gpt4d.parallel.kernels import Tensor, TorchFunction, elementwise, kernel, planned_kernel, wide_dtype
from gpt4d.parallel.layers.activations import DropoutFunction
from gpt4d.parallel.layers.attention_backends import attention_of_documents, takes_documents, with_heads
from gpt4d.parallel.layers.context_attention import (
    GatheredKeys,
    RingKeys,
    SharedAttention,
    gathered_keys,
    segments_mask,
)
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.layers.sharding import local_heads
from gpt4d.parallel.lazy import F, torch


@kernel(lambda sample_ids, places, key, first_head, heads: sample_ids.like((*sample_ids.shape, heads, places.shape[1])))
def weight_rows(sample_ids, places, key: int, first_head: int, heads: int):
    """Return the key of the dropout mask of each row of attention weights, int64 [B, h, S]. ``places``: [B, S]."""
    device = sample_ids.device
    numbers = torch.arange(first_head, first_head + heads, device=device)
    rows = random.fold(random.fold(key, sample_ids)[:, None], numbers)[..., None]
    return random.fold(rows, places[:, None])


@kernel(lambda q, *_: q.like((q.shape[1], q.shape[1])), unread=("q",))
def window_mask(q, documents, cache, window: int):
    """Return 0 for each key that a query attends to and -inf for other keys, [S, S] in the dtype of ``q``.

    A query attends to the last ``window`` keys up to its own token. Documents or a key-value cache restrict the keys
    further, and the mask is [B, 1, S, keys]. Return None if an NVIDIA GPU runs variable-length attention.
    """
    if documents is not None and takes_documents(q):
        return None
    allowed = None if documents is None else documents.mask
    places = torch.arange(q.shape[1], device=q.device)[:, None]
    if cache is not None:
        allowed, places = cache.mask, cache.places[:, None, :, None]
    keys = torch.arange(q.shape[1] if allowed is None else allowed.shape[-1], device=q.device)
    hidden = (keys <= places - window) | (keys > places if allowed is None else ~allowed)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


# ------------------------------------------------------------------------------------------- keys and values


def groups_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's kernel for queries ``q`` takes fewer heads of keys and values than of queries.

    FlashAttention and cuDNN do, but they require a GPU and bfloat16. Torch's other kernels, which support masks and
    float32, need as many heads. Some GPUs do not support the backward for larger heads.
    """
    return mask is None and not q.is_cpu and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 192


@planned_kernel
def repeated_heads(x, times: int):
    """Return [B, S, heads, s] with each head repeated ``times`` times."""
    return x.like((*x.shape[:2], x.shape[2] * times, x.shape[3]))


@planned_kernel
def sums_of_repeated(d_out, times: int):
    """Return the gradient of ``repeated_heads``."""
    return d_out.like((*d_out.shape[:2], d_out.shape[2] // times, d_out.shape[3]))


class RepeatedHeadsFunction(TorchFunction):
    """Key-value heads [B, S, heads, s], each repeated for the ``times`` query heads that it serves."""

    @staticmethod
    def in_torch(x, times: int):
        return x.repeat_interleave(times, 2)

    @staticmethod
    def forward(ctx, x, times: int):
        ctx.times = times
        return repeated_heads(x, times)

    @staticmethod
    def backward(ctx, d_out):
        return sums_of_repeated(d_out, ctx.times), None


# -------------------------------------------------------------------------------------------- without dropout


def _attention_flops(q, k, *_) -> int:
    """Return the FLOPs of the two products of attention to all keys."""
    return 4 * math.prod(q.shape) * k.shape[1]


def _executed_flops(q, k, mask, causal: bool) -> float:
    """Return the FLOPs that torch's kernels execute: half of them for causal attention, all with another mask."""
    return _attention_flops(q, k) / (2 if causal and mask is None else 1)


@planned_kernel(flops=_attention_flops, attention=lambda q, k, v, mask, causal: _executed_flops(q, k, mask, causal))
def fused_attention(q, k, v, mask, causal: bool):
    """Return the output [B, S, h, s] and a statistic of each row of scores, [B, h, S]."""
    batch, length, heads, _ = q.shape
    return q.like(), q.like((batch, heads, length), wide_dtype(q))


def _expanded_bytes(d_out, q, k, *_) -> int:
    """Return the bytes of the gradients of repeated keys and values, which torch's kernel computes and adds up."""
    return 0 if k.shape[2] == q.shape[2] else 2 * k.nbytes * q.shape[2] // k.shape[2]


@planned_kernel(
    flops=lambda d_out, *inputs: 2.5 * _attention_flops(*inputs),
    attention=lambda d_out, q, k, v, out, statistics, mask, causal: 2.5 * _executed_flops(q, k, mask, causal),
    temporary=_expanded_bytes,
)
def fused_attention_gradients(d_out, q, k, v, out, statistics, mask, causal: bool):
    """Return the gradients of queries, keys and values. The kernel recomputes the scores."""
    return q.like(), k.like(), v.like()


class AttentionFunction(TorchFunction):
    """The output [T, h·s] of attention on queries, keys and values [B, S, h, s], from torch's fused kernels.

    Keys and values may have fewer heads (``groups_heads``). ``documents`` restrict the attention. On an NVIDIA GPU,
    variable-length attention takes their lengths and skips keys of other documents. ``mask``: the keys that each query
    attends to; None: the keys up to its own token if ``causal``, else all keys. ``window`` applies to variable-length
    attention; in other cases the mask contains it. ``scale``: as for ``AttentionSpec``. The planner has no documents.
    """

    @staticmethod
    def in_torch(q, k, v, documents, mask, causal: bool, window: int | None = None, scale: float | None = None):
        if documents is not None and mask is None:
            if takes_documents(q):
                return attention_of_documents(q, k, v, documents.starts, window, scale).flatten(1)
            mask, k, v = documents.mask, with_heads(k, q.shape[2]), with_heads(v, q.shape[2])
        grouped = k.shape[2] != q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = causal and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])

    @staticmethod
    def forward(ctx, q, k, v, documents, mask, causal: bool, window: int | None = None, scale: float | None = None):
        out, statistics = fused_attention(q, k, v, mask, causal)
        ctx.save_for_backward(q, k, v, out, statistics, *(() if mask is None else (mask,)))
        ctx.causal = causal
        return out.flatten(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, d_out):
        *saved, mask = (*ctx.saved_tensors, None)[:6]
        return *fused_attention_gradients(d_out, *saved, mask, ctx.causal), *[None] * 5


# ----------------------------------------------------------------------------------------------- with dropout


def _as_batch(x):
    """Return [B, S, h, s] as a batch of matrices, one per head: a copy if no single stride describes the batch."""
    return x if 1 in (x.shape[0], x.shape[2]) else elementwise(x)


@planned_kernel(flops=lambda q, k: 2 * math.prod(q.shape) * k.shape[1])
def score_products(q, k):
    """Return the products of queries and keys, [B, h, S, S]."""
    batch, length, heads, _ = q.shape
    return q.like((batch, heads, length, k.shape[1]))


@planned_kernel(unread=("scores",))
def later_keys(scores):
    """Return the causal mask [S, S], True for keys after the query's token."""
    return scores.like(scores.shape[-2:], "bool")


@planned_kernel(flops=lambda weights, values, *_: 2 * math.prod(weights.shape) * values.shape[3])
def weighted_sums(weights, values, transposed: bool = False):
    """Return the products of weights or gradients [B, h, S, S], or of their transpose, with ``values`` [B, S, h, s]."""
    return values.like((values.shape[0], weights.shape[3 if transposed else 2], *values.shape[2:]))


class ScoresFunction(TorchFunction):
    """Scores [B, h, S, S] of queries and keys [B, S, h, s], with ``-inf`` at masked keys.

    Arguments as for ``AttentionFunction``.
    """

    @staticmethod
    def in_torch(q, k, mask, causal: bool, scale: float | None = None):
        q, k = (x.transpose(1, 2) for x in (q, k))
        found = q @ k.transpose(-1, -2)
        found = found / math.sqrt(q.shape[-1]) if scale is None else found * scale
        if causal:
            if mask is None:
                mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).tril_()
            found = found.masked_fill(~mask, -torch.inf)
        return found

    @staticmethod
    def forward(ctx, q, k, mask, causal: bool, scale: float | None = None):
        q, k = _as_batch(q), _as_batch(k)
        scores = elementwise(score_products(q, k))  # scaled
        hidden = later_keys(scores) if causal else None
        ctx.save_for_backward(q, k, *(() if hidden is None else (hidden,)))
        return scores if hidden is None else elementwise(scores, hidden)

    @staticmethod
    def backward(ctx, d_scores):
        q, k, *hidden = ctx.saved_tensors
        if hidden:
            d_scores = elementwise(d_scores, *hidden)
        d_scores = elementwise(d_scores)  # scaled
        return weighted_sums(d_scores, k), weighted_sums(d_scores, q, True), None, None, None


class SoftmaxFunction(TorchFunction):
    """Attention weights of scores, over the last dim."""

    @staticmethod
    def in_torch(scores):
        return scores.softmax(-1)

    @staticmethod
    def forward(ctx, scores):
        weights = elementwise(scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, d_weights):
        return elementwise(d_weights, *ctx.saved_tensors)


class MixedValuesFunction(TorchFunction):
    """The product [T, h·s] of attention weights [B, h, S, S] and values [B, S, h, s]."""

    @staticmethod
    def in_torch(weights, v):
        return (weights @ v.transpose(1, 2)).transpose(1, 2).reshape(-1, v.shape[2] * v.shape[3])

    @staticmethod
    def forward(ctx, weights, v):
        v = _as_batch(v)
        ctx.save_for_backward(weights, v)
        out = weighted_sums(weights, v)
        if out.shape[2] > 1:  # makes the heads of a token contiguous
            out = elementwise(out)
        return out.flatten(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, d_out):
        weights, v = ctx.saved_tensors
        batch, _, heads, size = v.shape
        d_out = _as_batch(d_out.view((batch, weights.shape[2], heads, size)))
        return score_products(d_out, v), weighted_sums(weights, d_out, True)


# ------------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Multi-head attention: queries, keys and values → [T, h·s].

    The axis ``stream`` splits the features of the residual stream. If it splits the heads too (ATP paper, §3.2), no
    computation is replicated. The preceding product then reduce-scatters its output instead of all-reducing it, and
    the following product all-gathers its input.

    Without dropout of attention weights, torch's fused kernels compute the attention. With dropout the weights are
    computed explicitly, because the dropout mask depends on the global heads and samples. gpt4d.model.module sets the
    layer's ``key`` from the seed and the layer's name.

    Attributes:
        heads: global number of heads.
        dropout: dropout probability of attention weights while training.
        causal: a token attends to itself and to earlier tokens; else to all tokens of its sample, as pixels do.
        stream: the axis that splits the features of the residual stream.
        parts: the sizes of the axes that split the heads must divide this number; None: the number of heads.
        window: maximum number of tokens that a token attends to, itself included; None: no limit. A window requires
            causal attention without dropout.
        scale: factor of the products of queries and keys; None: 1/sqrt(size of a head).
    """

    heads: int
    dropout: float = 0.0
    causal: bool = True
    stream: str | None = "y"
    parts: int | None = None
    window: int | None = None
    scale: float | None = None

    def prepare(self, layer: BoundLayer) -> None:
        assert self.window is None or (self.causal and self.dropout == 0), "a window needs causality and no dropout"
        context = layer.context
        axes = [context.grid.axis(name) for name in context.head_axes(self.parts or self.heads, self.stream)]
        layer.first_head, layer.heads = local_heads(self.heads, axes)
        layer.key = 0

    async def forward(self, layer: BoundLayer, q: Tensor, k: Tensor, v: Tensor, tokens: TokenIndex) -> Tensor:
        """Return the output [T, h·s].

        Args:
            layer: the layer of this spec.
            q: queries [B, S, h, s].
            k: keys [B, S, heads, s], with h heads or with fewer heads that each serve equally many heads of queries.
            v: values, shaped like ``k``.
            tokens: the tokens of q, k and v (gpt4d.parallel.layers.sequence).
        """
        documents, mask, context = tokens.documents, None, tokens.context
        assert documents is None or (self.causal and tokens.cache is None), "documents need causality and no cache"
        current = layer.current_pass
        drops = current.records and self.dropout > 0
        if context is not None and not drops and tokens.cache is None:
            shared = (RingKeys if layer.context.context_ring else GatheredKeys)(context)
            masked = self.window is not None or documents is not None
            if masked:
                steps = self._of_tokens(tokens, lambda: shared.masked_steps(q, documents, self.window))
            else:
                steps = shared.steps(q)
            calls = tokens.attention_calls if current.records and not current.recompute else None
            call = SharedAttention(shared, steps, self.scale, current.recompute, calls)
            return (await call.forward(q, k, v)).flatten(0, 1).flatten(1)
        if context is not None:
            k, v = await gathered_keys(k, v, context)
            mask = segments_mask(q, documents, context.size, context.index) if drops else None
        if tokens.cache is not None:
            (k, v), mask = tokens.cache.extend(layer, k, v), tokens.cache.mask
        if self.window is not None and self.window < k.shape[1]:
            mask = self._of_tokens(tokens, lambda: window_mask(q, documents, tokens.cache, self.window))
        if k.shape[2] != layer.heads and (drops or not groups_heads(q, mask)):
            times = layer.heads // k.shape[2]
            k, v = RepeatedHeadsFunction.apply(k, times), RepeatedHeadsFunction.apply(v, times)
        if not drops:
            return AttentionFunction.apply(q, k, v, documents, mask, self.causal, self.window, self.scale)
        if documents is not None and context is None:
            mask = documents.mask
        weights = SoftmaxFunction.apply(ScoresFunction.apply(q, k, mask, self.causal, self.scale))
        rows = weight_rows(tokens.sample_ids, tokens.indices, layer.key, layer.first_head, layer.heads)
        return MixedValuesFunction.apply(DropoutFunction.apply(weights, rows, 0, self.dropout), v)

    @cached_property
    def _masks(self) -> WeakKeyDictionary[TokenIndex, Any]:
        """The masks of each microbatch's tokens, which all layers of this spec share."""
        return WeakKeyDictionary()

    def _of_tokens(self, tokens: TokenIndex, compute: Callable[[], Any]) -> Any:
        if tokens not in self._masks:
            self._masks[tokens] = compute()
        return self._masks[tokens]


@dataclass(frozen=True)
class FusedAttentionSpec(AttentionSpec):
    """Attention on queries, keys and values in one tensor [T, 3, h·s], the output of a fused product."""

    async def forward(self, layer: BoundLayer, qkv: Tensor, tokens: TokenIndex) -> Tensor:  # type: ignore[override]
        rows, fused, columns = qkv.shape
        heads = rows // tokens.length, tokens.length, fused, layer.heads, columns // layer.heads
        q, k, v = qkv.view(heads).unbind(2)
        return await super().forward(layer, q, k, v, tokens)
