"""The cost of each layer type, written once: parameters, FLOPs, bytes moved, collectives and memory. No torch here.

Descriptions are made of these. gpt4d.model.description.LayerCost states what ``forward`` and ``backward`` hold. Both
are coroutines that take their turns where the layer does (gpt4d.parallel.turns).
Tests compare them with what a run counts.
"""

import math
from dataclasses import dataclass

from gpt4d.model.description import Walk
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights

MASTER_BYTES = 4  # of a weight, of its gradient and of each of AdamW's two states
_STATISTIC = 4  # bytes of one statistic of a norm or of the loss: float32


def _prefixed(name: str, parameters: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    return {f"{name}.{key}" if name else key: spec for key, spec in parameters.items()}


def _cast(walk: Walk, narrow: int, wide: int) -> None:
    """Convert between an activation of ``narrow`` bytes and the same in float32, unless it is float32 itself."""
    if narrow != wide:
        walk.compute(moved=narrow + wide)


class _Simple:
    """Defaults of layers without parameters, streamed weights or noteworthy FLOPs."""

    def parameters(self) -> dict[str, ParameterSpec]:
        return {}

    def weights(self) -> LayerWeights:
        return LayerWeights()

    def flops(self, length: int) -> float:
        return 0.0


@dataclass(frozen=True)
class LinearCost:
    """A linear layer (4D paper, Algorithm 1). ``tied`` names another layer's weight [out, in] that it uses instead.

    A layer whose input is data (``input_gradient`` false) neither gathers its weight in the backward nor reduces.
    ``heads``: of the attention that it leads to or from, which y may split too (gpt4d.parallel.layers.attention).
    """

    name: str
    in_features: int
    out_features: int
    transposed: bool = False
    num_fused: int | None = None
    bias: bool = True
    tied: str | None = None
    input_gradient: bool = True
    heads: int | None = None

    def parameters(self) -> dict[str, ParameterSpec]:
        if self.tied:
            return {}
        transposed, fused, bias = self.transposed, self.num_fused, self.bias
        layer = specs.linear(self.in_features, self.out_features, transposed=transposed, num_fused=fused, bias=bias)
        return _prefixed(self.name, layer)

    @property
    def _weight(self) -> str:
        return f".{self.tied}" if self.tied else f"{self.name}.weight"

    def weights(self) -> LayerWeights:
        names = (self._weight,)
        return LayerWeights(names, names, names if self.input_gradient else ())

    @property
    def _axes(self) -> tuple[str, str]:
        return specs.linear_axes(self.transposed)

    def flops(self, length: int) -> float:
        return 2 * length * self.in_features * self.out_features * (self.num_fused or 1)

    def _local(self, walk: Walk) -> tuple[int, int]:
        """Return this device's input and output features."""
        contracted, produced = self._axes
        out_features = self.out_features * (self.num_fused or 1)
        return self.in_features // walk.size(contracted), out_features // walk.size(produced)

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        """Return the bytes of the input and of the output, both whole."""
        k, n = self._local(walk)
        return walk.tokens * k * walk.element_bytes, walk.tokens * n * walk.element_bytes

    def _splits(self, walk: Walk) -> tuple[str | None, str | None]:
        """Return what is split of the input, which is gathered, and of the output, which is scattered."""
        stream = "tokens" if walk.sequence_parallel else None
        inner = "features" if self.heads and "y" in walk.head_axes(self.heads) else None
        before, after = specs.sides(stream, inner, self.transposed)
        contracted, produced = self._axes
        return before if walk.size(produced) > 1 else None, after if walk.size(contracted) > 1 else None

    async def take_input(self, walk: Walk) -> None:
        """Begin a forward: keep the input, gathered if it is split."""
        before, after = self._splits(walk)
        if before:
            whole, axis = self._bytes(walk)[0], self._axes[1]
            part = whole // walk.size(axis)
            walk.hold(whole)
            await walk.turn(walk.start("all_gather", axis, part))
            if before == "features":
                walk.scratch(whole)
                walk.compute(moved=2 * whole)  # the attention core keeps its part
            else:
                walk.release(part)
        elif after:
            await walk.turn()

    async def forward(self, walk: Walk) -> None:
        await self.take_input(walk)
        k, n = self._local(walk)
        in_bytes, out_bytes = self._bytes(walk)
        contracted, (_, after) = self._axes[0], self._splits(walk)
        walk.gather(self._weight)
        walk.hold(out_bytes)
        walk.compute(2 * walk.tokens * (k * n), in_bytes + k * n * walk.element_bytes + out_bytes)
        walk.multiplied()
        if after == "features":
            walk.scratch(out_bytes)
            walk.compute(moved=2 * out_bytes)
        part = out_bytes // walk.size(contracted) if after else out_bytes
        walk.hold(part if after else 0)
        await walk.turn(walk.start("reduce_scatter" if after else "all_reduce", contracted, out_bytes))
        walk.release(out_bytes if after else 0)
        if self.bias and walk.size(contracted) > 1:  # otherwise the product adds it
            walk.compute(moved=2 * part)

    def gather_gradient(self, walk: Walk) -> object:
        """Start to gather the gradient of an output that was scattered, as the backward begins; None for another."""
        contracted, (_, after) = self._axes[0], self._splits(walk)
        if not after:
            return None
        out_bytes = self._bytes(walk)[1]
        walk.hold(out_bytes)
        return walk.start("all_gather", contracted, out_bytes // walk.size(contracted))

    async def backward(self, walk: Walk, keep_gradient: bool = False, gathering: object = None) -> None:
        """Walk through the backward.

        Args:
            walk: the device.
            keep_gradient: the gradient of the output stays held, since the residual stream needs it too.
            gathering: what ``gather_gradient`` has started.
        """
        k, n = self._local(walk)
        in_bytes, out_bytes = self._bytes(walk)
        (contracted, produced), (before, after) = self._axes, self._splits(walk)
        flops, pending = 2 * walk.tokens * (k * n), None
        if after:
            if gathering is None:
                await walk.turn(self.gather_gradient(walk))
            else:
                walk.wait(gathering)
            if after == "features":
                walk.scratch(out_bytes)
                walk.compute(moved=2 * out_bytes)
            walk.release(0 if keep_gradient else out_bytes // walk.size(contracted))
        if self.input_gradient:
            walk.gather(self._weight)
            walk.hold(in_bytes)
            walk.compute(flops, out_bytes + k * n * walk.element_bytes + in_bytes)
            walk.multiplied()
            if before == "features":
                walk.scratch(in_bytes)
                walk.compute(moved=2 * in_bytes)
            if before:
                walk.hold(in_bytes // walk.size(produced))
            pending = walk.start("reduce_scatter" if before else "all_reduce", produced, in_bytes)
            if not walk.overlap.all_reduce:
                walk.wait(pending)
                pending = None
        gradient = k * n * MASTER_BYTES
        walk.hold(gradient)
        walk.compute(flops, in_bytes + out_bytes + gradient)
        walk.scatter(self._weight)
        if self.bias:
            walk.compute(moved=out_bytes)
            walk.add_gradient(f"{self.name}.bias")
        walk.release(out_bytes if after or not keep_gradient else 0)
        walk.release(in_bytes if walk.recomputed else 0)  # a recomputed input is dropped once it has been read
        await walk.turn(pending)
        walk.release(0 if walk.recomputed else in_bytes)
        if before and self.input_gradient:
            walk.release(in_bytes)  # the gradient before it was scattered
        if before == "features":
            walk.release(in_bytes // walk.size(produced))  # what the attention core has kept


@dataclass(frozen=True)
class LayerNormCost(_Simple):
    """LayerNorm over features that y splits. In a residual branch its input belongs to the stream (``branch``)."""

    name: str
    features: int
    branch: bool = True

    def parameters(self) -> dict[str, ParameterSpec]:
        return _prefixed(self.name, specs.layer_norm(self.features))

    def _bytes(self, walk: Walk) -> tuple[int, int, int]:
        """Return the bytes of the activation, of the same in float32, and of the statistics."""
        elements = walk.stream_tokens * (self.features // walk.sizes.y)
        return elements * walk.element_bytes, elements * 4, 2 * walk.stream_tokens * _STATISTIC

    async def forward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        walk.hold(x + statistics)
        if walk.sizes.y == 1:
            walk.compute(moved=2 * x)
            return
        walk.scratch((1 if walk.element_bytes == 4 else 2) * wide)
        _cast(walk, x, wide)
        walk.compute(moved=6 * wide, operations=5)
        walk.do("all_gather", "y", statistics)
        walk.compute(moved=8 * wide, operations=10)
        _cast(walk, x, wide)

    async def backward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        if walk.sizes.y == 1 and walk.element_bytes == MASTER_BYTES:
            walk.scratch(x)
            walk.compute(moved=3 * x)
        elif walk.sizes.y == 1:  # sums over tokens are computed apart, in float32
            walk.scratch(x + 2 * wide)
            walk.compute(moved=6 * x + 6 * wide, operations=6)
        else:
            walk.scratch(5 * wide)
            _cast(walk, x, wide)
            walk.compute(moved=x + 10 * wide, operations=7)
            walk.do("all_reduce", "y", statistics)
            walk.compute(moved=14 * wide, operations=8)
            _cast(walk, x, wide)
        walk.release(statistics)
        for name in self.parameters():
            walk.add_gradient(name)
        if not self.branch:
            walk.release(x)


@dataclass(frozen=True)
class ActivationCost(_Simple):
    """An elementwise function of features that ``axis`` splits, such as GELU; a gated one halves them."""

    in_features: int
    out_features: int
    axis: str = "x"

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        local = walk.tokens * walk.element_bytes
        size = walk.size(self.axis)
        return local * (self.in_features // size), local * (self.out_features // size)

    async def forward(self, walk: Walk) -> None:
        in_bytes, out_bytes = self._bytes(walk)
        walk.hold(out_bytes)
        walk.compute(moved=in_bytes + out_bytes)

    async def backward(self, walk: Walk) -> None:
        in_bytes, out_bytes = self._bytes(walk)
        walk.hold(in_bytes)
        walk.compute(moved=2 * in_bytes + out_bytes)
        walk.release(in_bytes + out_bytes)


@dataclass(frozen=True)
class CausalAttentionCost(_Simple):
    """The attention core on fused queries, keys and values of ``hidden`` features each; x, or x and y, split the heads.

    With dropout the attention weights are written out; without it torch's fused kernel never holds them.
    """

    heads: int
    hidden: int
    dropout: bool

    def flops(self, length: int) -> float:
        """The half that the causal mask leaves runs about half as fast as a large product: it is counted whole."""
        return 4 * length * length * self.hidden

    def _local(self, walk: Walk) -> tuple[int, int, int, float]:
        """Return the bytes of the output, of the attention weights and of all that is kept, and the FLOPs of a pass."""
        parts = math.prod(walk.size(axis) for axis in walk.head_axes(self.heads))
        hidden, scores = self.hidden // parts, 0
        if self.dropout:
            scores = walk.samples * self.heads // parts * walk.length**2 * 3 * walk.element_bytes
        kept = walk.tokens * self.heads // parts * _STATISTIC + scores
        return walk.tokens * hidden * walk.element_bytes, scores, kept, 4 * walk.tokens * walk.length * hidden

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


@dataclass(frozen=True)
class TokenEmbeddingCost(_Simple):
    """Rows of a table whose vocabulary x splits, summed over x."""

    name: str
    rows: int
    hidden: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return _prefixed(self.name, specs.token_embedding(self.rows, self.hidden))

    def weights(self) -> LayerWeights:
        return LayerWeights(forward=(f"{self.name}.weight",))

    async def forward(self, walk: Walk) -> None:
        x = walk.tokens * (self.hidden // walk.sizes.y) * walk.element_bytes
        walk.gather(f"{self.name}.weight")
        walk.hold(x)
        walk.compute(moved=2 * x, operations=6)
        walk.multiplied()
        if walk.sizes.x > 1:  # rows of other ranks are set to zero
            walk.compute(moved=2 * x)
        if walk.stream_tokens == walk.tokens:
            walk.do("all_reduce", "x", x)
        else:
            walk.hold(x // walk.sizes.x)
            walk.do("reduce_scatter", "x", x)
            walk.release(x)

    async def backward(self, walk: Walk) -> None:
        local_hidden, e = self.hidden // walk.sizes.y, walk.element_bytes
        table = self.rows // walk.sizes.x * local_hidden * MASTER_BYTES
        x, rows = walk.tokens * local_hidden * e, walk.tokens * local_hidden * MASTER_BYTES
        if walk.stream_tokens != walk.tokens:
            walk.hold(x)
            walk.do("all_gather", "x", x // walk.sizes.x)
            walk.release(x // walk.sizes.x)
        walk.scratch(rows + table)
        walk.hold(table)
        _cast(walk, x, rows)
        walk.compute(moved=5 * rows + table, operations=3)
        walk.release(x)
        walk.scatter(f"{self.name}.weight")


@dataclass(frozen=True)
class PositionEmbeddingCost(_Simple):
    """Learned position vectors, added to the residual stream."""

    name: str
    positions: int
    hidden: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return _prefixed(self.name, specs.position_embedding(self.positions, self.hidden))

    def _bytes(self, walk: Walk) -> int:
        return walk.stream_tokens * (self.hidden // walk.sizes.y) * walk.element_bytes

    async def forward(self, walk: Walk) -> None:
        x = self._bytes(walk)
        walk.hold(x)
        walk.compute(moved=2 * x, operations=2)  # the vectors are expanded, not copied for each sample
        walk.release(x)

    async def backward(self, walk: Walk) -> None:
        gradient = self.positions * (self.hidden // walk.sizes.y) * MASTER_BYTES
        walk.hold(gradient)
        walk.compute(moved=self._bytes(walk) + 3 * gradient, operations=2)
        walk.release(gradient)
        walk.add_gradient(f"{self.name}.weight")


@dataclass(frozen=True)
class CrossEntropyCost(_Simple):
    """The loss of logits whose (padded) vocabulary x splits. Its input's gradient takes the place of the input."""

    vocabulary: int

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        """Return the bytes of the logits, and of the same in float32."""
        elements = walk.tokens * (self.vocabulary // walk.sizes.x)
        return elements * walk.element_bytes, elements * 4

    async def forward(self, walk: Walk) -> None:
        logits, wide = self._bytes(walk)
        if walk.element_bytes != 4:
            walk.hold(wide)
        _cast(walk, logits, wide)
        walk.compute(moved=wide)
        walk.do("all_reduce", "x", walk.tokens * _STATISTIC)
        walk.hold(wide)  # shifted logits; in their place the exponentials, the probabilities and the gradient
        walk.compute(moved=7 * wide, operations=9)
        walk.do("all_reduce", "x", 2 * walk.tokens * _STATISTIC)
        walk.release(logits + (wide if walk.element_bytes != 4 else 0))

    async def backward(self, walk: Walk) -> None:
        logits, wide = self._bytes(walk)
        walk.compute(moved=2 * wide, operations=4)
        _cast(walk, logits, wide)
        if walk.element_bytes != 4:
            walk.hold(logits)
            walk.release(wide)
