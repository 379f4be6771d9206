"""Context parallelism in plain torch: ring attention with balanced segments, and Ulysses.

Shapes: C ranks of a group share B sequences. B sequences, S positions of a rank, h heads of queries, g heads of keys
and values, s size of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_KEYS, _GRADIENTS = 0, 1  # tags of messages


class Exchange(NamedTuple):
    """A message to the next rank of the ring and a message from the previous rank, both in flight."""

    sent: torch.Tensor  # alive until it is sent
    received: torch.Tensor
    requests: tuple[Any, ...]

    def wait(self) -> torch.Tensor:
        for request in self.requests:
            request.wait()
        return self.received


class Ring:
    """The ranks of a group in a ring. Rank r has segments r and 2·C - 1 - r of each sequence, concatenated."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.following, self.previous = (
            dist.get_global_rank(group, (self.rank + offset) % self.size) for offset in (1, -1)
        )

    def exchange(self, tensor: torch.Tensor, tag: int) -> Exchange:
        """Start to send ``tensor`` to the next rank and to receive an equally large one from the previous rank."""
        received = torch.empty_like(tensor)
        requests = (
            dist.isend(tensor, self.following, self.group, tag),
            dist.irecv(received, self.previous, self.group, tag),
        )
        return Exchange(tensor, received, requests)

    def block(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """Return which queries attend to which keys in a step, and whether the attention is causal.

        In step n, a rank has the keys of the n-th rank before it. ``length``: positions of a rank, S.
        """
        source, everything, half = (self.rank - step) % self.size, slice(0, length), length // 2
        if source == self.rank:
            return everything, everything, True
        if source < self.rank:
            return everything, slice(0, half), False
        return slice(half, length), everything, False


class RingAttention(torch.autograd.Function):
    """Causal attention of queries [B, h, S, s] to keys and values [2, B, g, S, s] that go round the ring.

    While a rank computes with the keys and values of one rank, it receives the keys and values of the next rank. The
    outputs of all steps are combined by their log-sum-exp. In the backward, the gradients of keys and values follow
    their keys round the ring, one step later.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, ring: Ring) -> torch.Tensor:
        current, length = kv, q.shape[2]
        for step in range(ring.size):
            exchange = ring.exchange(current, _KEYS) if step + 1 < ring.size else None
            rows, columns, causal = ring.block(step, length)
            part, part_statistics = _flash(q[:, :, rows], *current[:, :, :, columns].unbind(), 0.0, causal)
            if step == 0:
                out, statistics = part, part_statistics
            else:
                _combine_(out[:, :, rows], statistics[:, :, rows], part, part_statistics)
            if exchange:
                current = exchange.wait()
        ctx.save_for_backward(q, kv, out, statistics)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        q, current, out, statistics = ctx.saved_tensors
        ring, length = ctx.ring, q.shape[2]
        d_q, d_kv, gradients = torch.zeros_like(q), torch.zeros_like(current), None
        for step in range(ring.size):
            exchange = ring.exchange(current, _KEYS) if step + 1 < ring.size else None
            rows, columns, causal = ring.block(step, length)
            saved = out[:, :, rows], statistics[:, :, rows]
            d_rows, *d_columns = _flash_backward(
                d_out[:, :, rows], q[:, :, rows], *current[:, :, :, columns].unbind(), *saved, 0.0, causal
            )
            d_q[:, :, rows] += d_rows
            if gradients:
                d_kv = gradients.wait()
            for total, part in zip(d_kv, d_columns, strict=True):
                total[:, :, columns] += _sum_of_groups(part, total.shape[1])
            gradients = ring.exchange(d_kv, _GRADIENTS)
            if exchange:
                current = exchange.wait()
        assert gradients is not None
        return d_q, gradients.wait(), None


def _combine_(out: torch.Tensor, statistics: torch.Tensor, part: torch.Tensor, part_statistics: torch.Tensor) -> None:
    """Combine in place the results of queries with their results for other keys: outputs and log-sum-exps."""
    weight = torch.sigmoid(part_statistics - statistics)
    out.lerp_(part, weight[..., None])
    statistics.copy_(torch.logaddexp(statistics, part_statistics))


def _sum_of_groups(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the gradient of ``heads`` heads of keys, which the kernel computes for each head of queries."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def ring_attention(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return ring attention on the ranks of ``group``, for a ``TorchLlama``."""
    ring = Ring(group)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = torch.stack((k.transpose(1, 2), v.transpose(1, 2)))
        return RingAttention.apply(q.transpose(1, 2), kv, ring).transpose(1, 2)

    return attention


class AllToAll(torch.autograd.Function):
    """Sends item r of [C, …] to rank r of a group and returns the received items, [C, …]."""

    @staticmethod
    def forward(ctx: Any, items: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(items, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, items.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, d_received: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllToAll.apply(d_received, ctx.group), None


def ulysses(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return the attention of DeepSpeed-Ulysses on the ranks of ``group``, for a ``TorchLlama``.

    Rank r has part r of each sequence. An all-to-all before the attention gives it all positions of its heads, and one
    after the attention gives it all heads of its positions. Ranks that have queries of one head of keys and values
    receive the same head.
    """
    ranks = group.size()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        copies = max(1, ranks // k.shape[2])
        if copies > 1:
            k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
        parts = [x.unflatten(2, (ranks, -1)) for x in (q, k, v)]  # each [B, S, C, heads / C, s]
        heads = [part.shape[3] for part in parts]
        received = AllToAll.apply(torch.cat(parts, 3).movedim(2, 0), group)
        whole = received.movedim(0, 1).flatten(1, 2)  # [B, C·S, heads / C, s]
        q, k, v = (x.transpose(1, 2) for x in whole.split(heads, 2))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        returned = AllToAll.apply(out.unflatten(1, (ranks, -1)).movedim(1, 0), group)  # [C, B, S, h / C, s]
        return returned.movedim(0, 2).flatten(2, 3)

    return attention
