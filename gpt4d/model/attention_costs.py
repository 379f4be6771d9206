"""The cost of the core of attention. No torch here."""

import math
from dataclasses import dataclass

from gpt4d.model.costs import STATISTIC, SimpleCost, rows
from gpt4d.model.description import Walk


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

    def _local(self, walk: Walk) -> tuple[int, int, int, float]:
        """Return the bytes of the output, of the attention weights and of all that is kept, and the FLOPs of a pass."""
        parts = math.prod(walk.size(axis) for axis in walk.head_axes(self.heads, self.stream))
        count, length = rows(walk, self.positions), self.positions or walk.length
        hidden, scores = self.hidden // parts, 0
        if self.dropout:
            scores = walk.samples * self.heads // parts * length**2 * 3 * walk.element_bytes
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
            walk.compute(moved=8 * scores)
        # The gradients of queries, keys and values are stacked, then put in the order of the fused layer's output.
        walk.compute(moved=2 * 6 * out_bytes, operations=2)
        walk.release(kept)
        walk.release(4 * out_bytes)  # the output's gradient; queries, keys and values
