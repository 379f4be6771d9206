"""The core of self-attention. Axes of the grid split the heads, so no rank needs another rank's. No torch here.

Shapes: B sequences, S positions, T tokens of all sequences, h heads of this rank, s size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from gpt4d.parallel.layers.activations import DropoutFunction
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.symbolic.kernels import TorchFunction, kernel, planned_kernel
from gpt4d.parallel.symbolic.tensor import wide_dtype


def local_heads(heads: int, axes: Sequence[Any]) -> tuple[int, int]:
    """Return the first head of this rank and how many it has, where ``axes``, outermost first, split them."""
    first = 0
    for axis in axes:
        heads //= axis.size
        first += axis.index * heads
    return first, heads


@kernel
def weight_rows(sample_ids, key: int, first_head: int, heads: int, length: int):
    """Return the key of the dropout mask of each row of attention weights, int64 [B, h, S]."""
    return sample_ids.like((*sample_ids.shape, heads, length))


@kernel(unread=("q",))
def window_mask(q, documents, cache, window: int):
    """Return 0 for each key that a query attends to and -inf for other keys, [S, S] in the dtype of ``q``.

    A query attends to the last ``window`` keys up to its own token. With documents or with a cache of keys and values,
    it attends to those of them that these allow, and the mask is [B, 1, S, keys]. On an NVIDIA GPU it is None where the
    kernel takes documents.
    """
    return q.like((q.shape[1], q.shape[1]))


# ------------------------------------------------------------------------------------------- keys and values


@planned_kernel
def repeated_heads(x, times: int):
    """Return [B, S, heads, s] with each head ``times`` in a row."""
    return x.like((*x.shape[:2], x.shape[2] * times, x.shape[3]))


@planned_kernel
def sums_of_repeated(d_out, times: int):
    """Return the gradient of ``repeated_heads``."""
    return d_out.like((*d_out.shape[:2], d_out.shape[2] // times, d_out.shape[3]))


class RepeatedHeadsFunction(TorchFunction):
    """Heads [B, S, heads, s] of which each serves ``times`` queries, repeated for each of them."""

    torch_name = "repeated"

    @staticmethod
    def forward(ctx, x, times: int):
        ctx.times = times
        return repeated_heads(x, times)

    @staticmethod
    def backward(ctx, d_out):
        return sums_of_repeated(d_out, ctx.times), None


# -------------------------------------------------------------------------------------------- without dropout


def _attention_flops(q, k, *_: Any) -> int:
    """Return the FLOPs of the two products of attention.

    The half that a causal mask leaves runs about half as fast as a large product: its FLOPs count. Other masks save
    nothing.
    """
    return 4 * math.prod(q.shape) * k.shape[1]


@planned_kernel(flops=_attention_flops)
def fused_attention(q, k, v, mask):
    """Return the attended values [B, S, h, s] and a statistic of each row of scores, [B, h, S]."""
    batch, length, heads, _ = q.shape
    return q.like(), q.like((batch, heads, length), wide_dtype(q))


@planned_kernel(flops=lambda d_out, *inputs: 2.5 * _attention_flops(*inputs))
def fused_attention_gradients(d_out, q, k, v, out, statistics, *masks):
    """Return the gradients of queries, keys and values. The scores are computed again."""
    return q.like(), k.like(), v.like()


class AttentionFunction(TorchFunction):
    """Attended values [T, h·s] of queries, keys and values [B, S, h, s], from torch's fused kernels.

    ``documents`` limit the attention, on an NVIDIA GPU through the kernel that takes their lengths and computes nothing
    between them. ``mask``: the keys that each query attends to; None: those up to its own token if it is ``causal``,
    else all. ``window``, with documents: as for ``AttentionSpec``; a mask limits the attention to it elsewhere.
    ``scale``: as for ``AttentionSpec``. The planner has no documents.
    """

    torch_name = "attention"

    @staticmethod
    def forward(ctx, q, k, v, documents, mask, causal: bool, window: int | None = None, scale: float | None = None):
        out, statistics = fused_attention(q, k, v, mask)
        ctx.save_for_backward(q, k, v, out, statistics, *(() if mask is None else (mask,)))
        return out.flatten(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, d_out):
        return *fused_attention_gradients(d_out, *ctx.saved_tensors), *[None] * 5


# ----------------------------------------------------------------------------------------------- with dropout


@planned_kernel
def copied(x):
    """Return a copy."""
    return x.like()


def _as_batch(x):
    """Return [B, S, h, s] as a batch of matrices, one for each head: a copy if their distances in memory differ."""
    return x if 1 in (x.shape[0], x.shape[2]) else copied(x)


@planned_kernel(flops=lambda q, k: 2 * math.prod(q.shape) * k.shape[1])
def score_products(q, k):
    """Return the products of all queries and all keys, [B, h, S, S]."""
    batch, length, heads, _ = q.shape
    return q.like((batch, heads, length, k.shape[1]))


@planned_kernel
def scaled_scores(scores):
    """Return scores divided by a number."""
    return scores.like()


@planned_kernel(unread=("scores",))
def later_keys(scores):
    """Return which keys are behind each query's token, [S, S]."""
    return scores.like(scores.shape[-2:], "bool")


@planned_kernel
def masked_scores(scores, hidden):
    """Return scores, or their gradients, with a constant where keys are hidden."""
    return scores.like()


@planned_kernel
def softmax_of_scores(scores):
    """Return the attention weights of scores."""
    return scores.like()


@planned_kernel
def softmax_gradient(d_weights, weights):
    """Return the gradient of scores."""
    return weights.like()


@planned_kernel(flops=lambda weights, values: 2 * math.prod(weights.shape) * values.shape[3])
def weighted_sums(weights, values):
    """Return the sums of ``values`` [B, S, h, s] by weights, or by gradients, [B, h, S, S] in either direction."""
    return values.like()


class ScoresFunction(TorchFunction):
    """Scores [B, h, S, S] of queries and keys [B, S, h, s], ``-inf`` where ``mask`` hides a key.

    Arguments as for ``AttentionFunction``.
    """

    torch_name = "scores"

    @staticmethod
    def forward(ctx, q, k, mask, causal: bool, scale: float | None = None):
        q, k = _as_batch(q), _as_batch(k)
        scores = scaled_scores(score_products(q, k))
        hidden = later_keys(scores) if causal else None
        ctx.save_for_backward(q, k, *(() if hidden is None else (hidden,)))
        return scores if hidden is None else masked_scores(scores, hidden)

    @staticmethod
    def backward(ctx, d_scores):
        q, k, *hidden = ctx.saved_tensors
        if hidden:
            d_scores = masked_scores(d_scores, *hidden)
        d_scores = scaled_scores(d_scores)
        return weighted_sums(d_scores, k), weighted_sums(d_scores, q), None, None, None


class SoftmaxFunction(TorchFunction):
    """Attention weights of scores, over the last dim."""

    torch_name = "softmax"

    @staticmethod
    def forward(ctx, scores):
        weights = softmax_of_scores(scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, d_weights):
        return softmax_gradient(d_weights, *ctx.saved_tensors)


class MixedValuesFunction(TorchFunction):
    """Sums [T, h·s] of values [B, S, h, s] by attention weights [B, h, S, S]."""

    torch_name = "mixed_values"

    @staticmethod
    def forward(ctx, weights, v):
        v = _as_batch(v)
        ctx.save_for_backward(weights, v)
        out = weighted_sums(weights, v)
        if out.shape[2] > 1:  # the heads of a token side by side
            out = copied(out)
        return out.flatten(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, d_out):
        weights, v = ctx.saved_tensors
        d_out = _as_batch(d_out.view_as(v))
        return score_products(d_out, v), weighted_sums(weights, d_out)


# ------------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """The attention of heads: queries, keys and values → [T, h·s].

    The axis ``stream`` splits the features of the residual stream. Where it splits the heads too (ATP paper, §3.2), no
    rank repeats another's attention: the product before scatters its output, instead of all-reducing it,
    and the one after gathers its input.

    Without dropout of the attention weights it uses torch's fused kernels. With dropout the weights are computed
    explicitly, because the dropout mask depends on the global heads and samples; gpt4d.model.init sets the layer's
    ``key`` from the seed and the layer's name.

    Attributes:
        heads: global number of heads.
        dropout: probability with which attention weights are dropped while training.
        causal: a token attends to itself and to the tokens before it; else to all of its sample, as pixels do.
        stream: splits the features of the residual stream.
        parts: the number that the axes that split the heads must divide; None: the heads.
        window: a token attends to at most so many tokens, itself and those right before it; None: no limit. Only causal
            attention without dropout has a window.
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
        assert self.window is None or (self.causal and self.dropout == 0), "only causal attention has a window"
        context = layer.context
        axes = [context.grid.axis(name) for name in context.head_axes(self.parts or self.heads, self.stream)]
        layer.first_head, layer.heads = local_heads(self.heads, axes)
        layer.key = 0

    def forward(self, layer: BoundLayer, q: Any, k: Any, v: Any, tokens: Any) -> Any:
        """Return the attended values of each token.

        Args:
            layer: the layer of this spec.
            q: queries [B, S, h, s].
            k: keys [B, S, heads, s]. If they have fewer heads than the queries, each serves equally many queries.
            v: values, shaped as ``k``.
            tokens: the tokens that they come from (gpt4d.parallel.layers.sequence).
        """
        documents, mask = tokens.documents, None
        assert documents is None or (self.causal and tokens.cache is None), "documents limit causal training only"
        if tokens.cache is not None:
            (k, v), mask = tokens.cache.extend(layer, k, v), tokens.cache.mask
        if self.window is not None and self.window < k.shape[1]:
            mask = self._window_mask(q, tokens, self.window)
        if k.shape[2] != layer.heads:
            times = layer.heads // k.shape[2]
            k, v = RepeatedHeadsFunction.apply(k, times), RepeatedHeadsFunction.apply(v, times)
        if not layer.training or self.dropout == 0:
            return AttentionFunction.apply(q, k, v, documents, mask, self.causal, self.window, self.scale)
        if documents is not None:
            mask = documents.mask
        weights = SoftmaxFunction.apply(ScoresFunction.apply(q, k, mask, self.causal, self.scale))
        rows = weight_rows(tokens.sample_ids, layer.key, layer.first_head, layer.heads, q.shape[1])
        return MixedValuesFunction.apply(DropoutFunction.apply(weights, rows, 0, self.dropout), v)

    @cached_property
    def _masks(self) -> WeakKeyDictionary[Any, Any]:
        """The masks of the window by the tokens, one for all layers that share this spec."""
        return WeakKeyDictionary()

    def _window_mask(self, q: Any, tokens: Any, window: int) -> Any:
        if tokens not in self._masks:
            self._masks[tokens] = window_mask(q, tokens.documents, tokens.cache, window)
        return self._masks[tokens]


@dataclass(frozen=True)
class FusedAttentionSpec(AttentionSpec):
    """The same of queries, keys and values in one tensor [T, 3, h·s], the output of a fused product."""

    def forward(self, layer: BoundLayer, qkv: Any, tokens: Any) -> Any:  # type: ignore[override]
        q, k, v = qkv.unflatten(0, (-1, tokens.length)).unflatten(-1, (layer.heads, -1)).unbind(2)
        return super().forward(layer, q, k, v, tokens)
