"""The costs of the core of attention, and of grouped-query attention. No torch here."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.model.costs import FLOAT32, MASTER_BYTES, STATISTIC, SimpleCost, prefixed, rows
from gpt4d.model.description import Walk, per_walk
from gpt4d.parallel.layers import norm, specs
from gpt4d.parallel.layers.norm import HeadNormSpec
from gpt4d.parallel.layers.rotary import rotated
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic import SymbolicTensor


@dataclass(frozen=True)
class AttentionCost(SimpleCost):
    """The attention core on fused queries, keys and values of ``hidden`` features each, whose heads are split.

    With dropout the attention weights are written out; without it torch's fused kernel never holds them.
    """

    heads: int
    hidden: int
    dropout: bool
    stream: str = "y"  # axis that splits the features of the residual stream
    positions: int | None = None  # of a sample; None: its tokens

    def flops(self, length: int) -> float:
        """The half that a causal mask leaves runs about half as fast as a large product: it is counted whole."""
        length = length if self.positions is None else self.positions
        return 4 * length * length * self.hidden

    @per_walk
    def _local(self, walk: Walk) -> tuple[int, int, int, float]:
        """Return the bytes of the output, of the attention weights and of all that is kept, and the FLOPs of a pass."""
        parts = math.prod(walk.size(axis) for axis in walk.head_axes(self.heads, self.stream))
        count, length = rows(walk, self.positions), self.positions or walk.length
        hidden, scores = self.hidden // parts, 0
        if self.dropout:
            scores = walk.samples * self.heads // parts * length**2 * 2 * walk.element_bytes
        kept = count * self.heads // parts * STATISTIC + scores
        return count * hidden * walk.element_bytes, scores, kept, 4 * count * length * hidden

    async def forward(self, walk: Walk) -> None:
        out_bytes, scores, kept, flops = self._local(walk)
        walk.hold(out_bytes + kept)
        walk.compute(flops, 4 * out_bytes)
        if self.dropout:
            walk.compute(moved=6 * scores)

    async def backward(self, walk: Walk) -> None:
        out_bytes, scores, kept, flops = self._local(walk)
        walk.hold(3 * out_bytes)
        walk.scratch(scores)
        walk.compute(2.5 * flops, 8 * out_bytes)
        if self.dropout:
            walk.compute(moved=7 * scores)
        walk.compute(moved=6 * out_bytes)  # the gradients of queries, keys and values are stacked
        walk.release(kept)
        walk.release(4 * out_bytes)  # the output's gradient; queries, keys and values


class _LocalHeads(NamedTuple):
    """Bytes of queries, keys and values on one device."""

    q: int  # of all queries
    columns: int  # of the keys, or of the values, that the product computes here
    gathered: int  # of the keys, or of the values, once gathered
    kv: int  # of the keys, or of the values, that the queries need
    axes: tuple[str, ...]  # to gather over, innermost first
    copied: bool  # one head for each query, which are not served equally


@dataclass(frozen=True)
class RotaryCost(SimpleCost):
    """The angles of rotary positions, which all blocks share: cosines and sines for half of a head's ``size``."""

    size: int

    def _bytes(self, walk: Walk) -> int:
        return walk.tokens * self.size // 2 * STATISTIC

    async def forward(self, walk: Walk) -> None:
        walk.hold(2 * self._bytes(walk))
        walk.compute(moved=9 * self._bytes(walk), operations=5)

    async def backward(self, walk: Walk) -> None:
        walk.release(2 * self._bytes(walk))


@dataclass(frozen=True)
class GroupedAttentionCost(SimpleCost):
    """Grouped-query attention between its products: heads, their norms, rotations and the core.

    Its input is a concatenation of queries, keys and values, whose columns the axes of the heads split equally.
    ``parts``: what these axes must divide. ``norms``: the norms of queries and keys by name; none without.
    """

    heads: int
    key_value_heads: int
    size: int
    parts: int
    norms: tuple[tuple[str, HeadNormSpec], ...] = ()

    def parameters(self) -> dict[str, ParameterSpec]:
        norms = [prefixed(name, spec.parameters()) for name, spec in self.norms]
        return {name: spec for norm in norms for name, spec in norm.items()}

    def flops(self, length: int) -> float:
        """Return the FLOPs of the core, counted as AttentionCost does."""
        return 4 * length * length * self.heads * self.size

    @per_walk
    def _local(self, walk: Walk) -> _LocalHeads:
        axes = walk.head_axes(self.parts)
        sizes = [walk.size(axis) for axis in axes]
        count = specs.axes_to_gather(self.key_value_heads, sizes)
        heads = self.heads // math.prod(sizes)
        served = specs.head_of_query(self.heads, self.key_value_heads, 0, heads)
        equally = specs.serves_equally(served)
        head_bytes = walk.tokens * self.size * walk.element_bytes
        return _LocalHeads(
            q=head_bytes * heads,
            columns=head_bytes * self.key_value_heads // math.prod(sizes),
            gathered=head_bytes * (self.key_value_heads // math.prod(sizes[: len(sizes) - count])),
            kv=head_bytes * (served[-1] + 1 if equally else heads),
            axes=axes[::-1][:count],
            copied=not equally,
        )

    def _gathered(self, walk: Walk, local: _LocalHeads) -> list[tuple[str, int]]:
        """Return the axes to gather over and the bytes of keys and values before each."""
        result, part = [], 2 * local.columns
        for axis in local.axes:
            result.append((axis, part))
            part *= walk.size(axis)
        return result

    def _kept(self, walk: Walk, local: _LocalHeads) -> tuple[int, int]:
        """Return the bytes that the core keeps besides its output, and those that the norms keep."""
        rows_of_q = local.q // walk.element_bytes // self.size
        rows_of_k = local.kv // walk.element_bytes // self.size
        norms = local.q + local.kv + (rows_of_q + rows_of_k) * STATISTIC if self.norms else 0
        return 3 * local.q + rows_of_q * STATISTIC, norms

    async def forward(self, walk: Walk) -> None:
        local, e = self._local(walk), walk.element_bytes
        concatenated = local.q + 2 * local.columns
        walk.scratch(concatenated)
        walk.compute(moved=2 * concatenated, operations=3)  # taken apart
        if local.axes:
            walk.compute(moved=4 * local.columns)  # keys and values together
        for axis, part in self._gathered(walk, local):
            whole = part * walk.size(axis)
            walk.scratch(2 * whole)
            await walk.turn(walk.start("all_gather", axis, part))
            walk.compute(moved=2 * whole)
        if local.copied:
            walk.compute(moved=4 * local.kv, operations=2)
        if self.norms:
            for nbytes in (local.q, local.kv):
                x, weight, *_ = self._rows(walk, nbytes)
                norm.rms_norm(x, None, weight, 0.0)
        self._rotate(walk, local.q)
        self._rotate(walk, local.kv)
        if local.kv < local.q:
            walk.compute(moved=2 * (local.kv + local.q), operations=2)
        walk.hold(local.q + sum(self._kept(walk, local)) - concatenated)  # the input lives no longer
        walk.compute(4 * walk.length * local.q / e, 4 * local.q)

    def _rotate(self, walk: Walk, nbytes: int) -> None:
        x, *_, angles = self._rows(walk, nbytes)
        rotated(x, angles, angles, 1)

    @per_walk
    def _rows(self, walk: Walk, nbytes: int) -> tuple[SymbolicTensor, ...]:
        """Return heads of so many bytes, the weight of their norm, a statistic of each head, and angles of tokens."""
        count = nbytes // walk.element_bytes // self.size
        x = SymbolicTensor(walk, (count, self.size), walk.dtype)
        shapes = (self.size,), (count,), (walk.tokens, self.size // 2)
        return x, *(x.like(shape, FLOAT32) for shape in shapes)

    async def backward(self, walk: Walk) -> None:
        local, e = self._local(walk), walk.element_bytes
        core, norms = self._kept(walk, local)
        walk.hold(3 * local.q)
        walk.compute(2.5 * 4 * walk.length * local.q / e, 8 * local.q)
        walk.release(local.q + core)
        if local.kv < local.q:
            walk.compute(moved=2 * (local.kv + local.q), operations=2)
            walk.release(2 * (local.q - local.kv))
        self._rotate(walk, local.kv)
        self._rotate(walk, local.q)
        for (name, _), nbytes in zip(self.norms[::-1], (local.kv, local.q), strict=False):
            x, weight, rstd, _ = self._rows(walk, nbytes)
            norm.rms_norm_gradients(x, None, x, rstd, weight)
            for axis in walk.head_axes(self.parts):
                walk.do("all_reduce", axis, self.size * MASTER_BYTES)
            walk.add_gradient(f"{name}.weight")
        walk.release(norms)
        if local.kv != local.gathered:
            walk.compute(moved=2 * (local.kv + local.gathered), operations=2)  # zeros for the other heads
        if local.axes:
            walk.compute(moved=4 * local.gathered)
        for axis, part in reversed(self._gathered(walk, local)):
            whole = part * walk.size(axis)
            walk.compute(moved=2 * whole)
            await walk.turn(walk.start("reduce_scatter", axis, whole))
        concatenated = local.q + 2 * local.columns
        walk.hold(concatenated)
        walk.compute(moved=2 * concatenated)
        walk.release(local.q + 2 * local.kv)
