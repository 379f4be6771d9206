"""The cost of each layer type, written once: parameters, FLOPs, bytes moved, collectives and memory. No torch here.

Those of products are in product_costs.py, of attention in attention_costs.py, of layers of pictures in conv_costs.py.

Descriptions are made of these. gpt4d.model.description.LayerCost states what ``forward`` and ``backward`` hold. Both
are coroutines that take their turns where the layer does (gpt4d.parallel.turns).
Tests compare them with what a run counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpt4d.model.description import LayerCost, Walk
from gpt4d.parallel import limits
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights

MASTER_BYTES = 4  # of a weight, of its gradient and of each of AdamW's two states
STATISTIC = 4  # bytes of one statistic of a norm or of the loss: float32


def prefixed(name: str, parameters: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    return {f"{name}.{key}" if name else key: spec for key, spec in parameters.items()}


def rows(walk: Walk, positions: int | None) -> int:
    """Return the rows of an activation on a device: ``positions`` of each sample, or its tokens for None."""
    return walk.tokens if positions is None else walk.samples * positions


def cast(walk: Walk, narrow: int, wide: int) -> None:
    """Convert between an activation of ``narrow`` bytes and the same in float32, unless it is float32 itself."""
    if narrow != wide:
        walk.compute(moved=narrow + wide)


def elementwise(walk: Walk, moved: float, operations: int, compiled: tuple[float, int]) -> None:
    """Compute ``operations`` that move so many bytes, or, with train.compile, the bytes and kernels ``compiled``."""
    if walk.compiled:
        moved, operations = compiled
    walk.compute(moved=moved, operations=operations)


def casts(narrow: int, wide: int) -> int:
    """Return the number of conversions between an activation of ``narrow`` bytes and the same in float32."""
    return int(narrow != wide)


class SimpleCost:
    """Defaults of layers without parameters, streamed weights or noteworthy FLOPs."""

    def parameters(self) -> dict[str, ParameterSpec]:
        return {}

    def weights(self) -> LayerWeights:
        return LayerWeights()

    def flops(self, length: int) -> float:
        return 0.0


class SequenceCost(ABC):
    """Layers one after another, each of which takes the output of the one before."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerCost]:
        """The layers in the order of execution."""

    def parameters(self) -> dict[str, ParameterSpec]:
        return {name: spec for layer in self.layers for name, spec in layer.parameters().items()}

    def weights(self) -> LayerWeights:
        uses = [layer.weights() for layer in self.layers]
        return LayerWeights(
            tuple(name for use in uses for name in use.forward),
            tuple(name for use in uses for name in use.recomputation),
            tuple(name for use in reversed(uses) for name in use.backward),
        )

    def flops(self, length: int) -> float:
        return sum(layer.flops(length) for layer in self.layers)

    async def forward(self, walk: Walk) -> None:
        for layer in self.layers:
            await layer.forward(walk)

    async def backward(self, walk: Walk) -> None:
        for layer in reversed(self.layers):
            await layer.backward(walk)


class NormCost(SimpleCost):
    """A norm. In a residual branch its input belongs to the stream (``branch``).

    ``adds``: compiled, it computes the sum of the stream that it takes, and of the stream's gradients.
    """

    branch: bool
    adds: ClassVar[bool] = True

    def end_backward(self, walk: Walk, x: int, statistics: int) -> None:
        """Hand over the gradients of the parameters and release what the norm has kept."""
        walk.release(statistics)
        for name in self.parameters():
            walk.add_gradient(name)
        if not self.branch:
            walk.release(x)


@dataclass(frozen=True)
class LayerNormCost(NormCost):
    """LayerNorm over features that y splits."""

    name: str
    features: int
    branch: bool = True

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, specs.layer_norm(self.features))

    def _bytes(self, walk: Walk) -> tuple[int, int, int]:
        """Return the bytes of the activation, of the same in float32, and of the statistics."""
        elements = walk.stream_tokens * (self.features // walk.sizes.y)
        return elements * walk.element_bytes, elements * 4, 2 * walk.stream_tokens * STATISTIC

    async def forward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        walk.hold(x + statistics)
        if walk.sizes.y == 1:
            walk.compute(moved=2 * x)
            return
        walk.scratch((1 if walk.element_bytes == 4 else 2) * wide)
        cast = casts(x, wide)
        elementwise(walk, 6 * wide + cast * (x + wide), 5 + cast, compiled=(x, 1))
        walk.do("all_gather", "y", statistics)
        elementwise(walk, x + 7 * wide + cast * (x + wide), 10 + cast, compiled=(2 * x, 7))

    def again(self, walk: Walk) -> None:
        """Compute the output once more, from the statistics if it takes a collective to find them."""
        x, wide, _ = self._bytes(walk)
        if walk.sizes.y == 1:
            walk.compute(moved=2 * x)
            return
        walk.scratch(2 * wide)
        cast = casts(x, wide)
        elementwise(walk, x + 7 * wide + cast * (x + wide), 4 + cast, compiled=(2 * x, 1))

    async def backward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        if walk.sizes.y == 1 and walk.element_bytes == MASTER_BYTES:
            walk.scratch(x)
            walk.compute(moved=3 * x)
        elif walk.sizes.y == 1:  # sums over tokens are computed apart, in float32
            walk.scratch(x + 2 * wide)
            elementwise(walk, 6 * x + 6 * wide, 6, compiled=(3 * x, 1))
        else:
            walk.scratch((3 if walk.element_bytes == 4 else 4) * wide)
            elementwise(walk, 2 * x + 9 * wide, 7, compiled=(2 * x, 1))
            walk.do("all_reduce", "y", statistics)
            both = 2 * casts(x, wide)
            elementwise(walk, x + 17 * wide + both * (x + wide), 9 + both, compiled=(3 * x, 2))
        self.end_backward(walk, x, statistics)


@dataclass(frozen=True)
class RMSNormCost(NormCost):
    """RMSNorm over features that y splits."""

    name: str
    features: int
    branch: bool = True

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, specs.rms_norm(self.features))

    def _elements(self, walk: Walk) -> int:
        return walk.stream_tokens * (self.features // walk.sizes.y)

    async def forward(self, walk: Walk) -> None:
        x, statistics = self._elements(walk) * walk.element_bytes, walk.stream_tokens * STATISTIC
        walk.hold(x + statistics)
        rms_forward(walk, self._elements(walk), split=walk.sizes.y > 1)
        walk.do("all_reduce", "y", statistics)

    def again(self, walk: Walk) -> None:
        """Compute the output once more, from the statistics."""
        x, wide = self._elements(walk) * walk.element_bytes, self._elements(walk) * 4
        walk.scratch(wide)
        cast = casts(x, wide)
        elementwise(walk, x + 3 * wide + cast * (x + wide), 2 + cast, compiled=(2 * x, 1))

    async def backward(self, walk: Walk) -> None:
        x, statistics = self._elements(walk) * walk.element_bytes, walk.stream_tokens * STATISTIC
        walk.do("all_reduce", "y", statistics)
        rms_backward(walk, self._elements(walk), split=walk.sizes.y > 1)
        self.end_backward(walk, x, statistics)


def rms_forward(walk: Walk, elements: int, split: bool = False) -> None:
    """Compute the RMSNorm of so many elements; ``split``: the statistics are summed over ranks in between."""
    x, wide = elements * walk.element_bytes, elements * 4
    walk.scratch((1 if walk.element_bytes == 4 else 2) * wide)
    both = 2 * casts(x, wide)
    # A square, its sum, two products; the statistics.
    elementwise(walk, x + 6 * wide + both * (x + wide), 6 + both, compiled=(3 * x, 5) if split else (2 * x, 1))


def rms_backward(walk: Walk, elements: int, split: bool = False) -> None:
    """Compute the gradients of the RMSNorm of so many elements."""
    x, wide = elements * walk.element_bytes, elements * 4
    walk.scratch(2 * wide)
    cast = casts(x, wide)
    elementwise(walk, 5 * x + 16 * wide + cast * (x + wide), 11 + cast, compiled=(5 * x, 3) if split else (3 * x, 1))


@dataclass(frozen=True)
class ActivationCost(SimpleCost):
    """An elementwise function of features that ``axis`` splits, such as GELU; a gated one halves them."""

    in_features: int
    out_features: int
    axis: str | None = "x"
    positions: int | None = None  # rows of a sample; None: its tokens

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        local = rows(walk, self.positions) * walk.element_bytes
        size = walk.size(self.axis)
        return local * (self.in_features // size), local * (self.out_features // size)

    async def forward(self, walk: Walk) -> None:
        in_bytes, out_bytes = self._bytes(walk)
        walk.hold(out_bytes)
        walk.compute(moved=in_bytes + out_bytes)

    def again(self, walk: Walk) -> None:
        """Compute the output once more."""
        walk.compute(moved=sum(self._bytes(walk)))

    async def backward(self, walk: Walk) -> None:
        in_bytes, out_bytes = self._bytes(walk)
        walk.hold(in_bytes)
        walk.compute(moved=2 * in_bytes + out_bytes)
        walk.release(in_bytes + out_bytes)


@dataclass(frozen=True)
class GatedCost(SimpleCost):
    """SwiGLU of two times ``features``, which x splits."""

    features: int

    async def forward(self, walk: Walk) -> None:
        out = walk.tokens * (self.features // walk.sizes.x) * walk.element_bytes
        walk.hold(out)
        self.again(walk)

    def again(self, walk: Walk) -> None:
        """Compute the output once more."""
        out = walk.tokens * (self.features // walk.sizes.x) * walk.element_bytes
        elementwise(walk, 5 * out, 2, compiled=(3 * out, 1))

    async def backward(self, walk: Walk) -> None:
        out = walk.tokens * (self.features // walk.sizes.x) * walk.element_bytes
        walk.hold(2 * out)
        walk.scratch(out)
        elementwise(walk, 11 * out, 4, compiled=(5 * out, 1))
        walk.release(3 * out)


@dataclass(frozen=True)
class TokenEmbeddingCost(SimpleCost):
    """Rows of a table whose vocabulary x splits, summed over x."""

    name: str
    rows: int
    hidden: int
    used: int | None = None  # rows without padding

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, specs.token_embedding(self.rows, self.hidden, used=self.used))

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
        x, wide = walk.tokens * local_hidden * e, walk.tokens * local_hidden * MASTER_BYTES
        if walk.stream_tokens != walk.tokens:
            walk.hold(x)
            walk.do("all_gather", "x", x // walk.sizes.x)
            walk.release(x // walk.sizes.x)
        added = walk.has_earlier_sum(f"{self.name}.weight")
        new = 0 if added else table
        walk.scratch(wide + new)
        walk.hold(new)
        cast(walk, x, wide)
        walk.compute(moved=5 * wide + new, operations=2 if added else 3)
        walk.release(x)
        walk.scatter(f"{self.name}.weight", added)


@dataclass(frozen=True)
class PositionEmbeddingCost(SimpleCost):
    """Learned position vectors, added to the residual stream."""

    name: str
    positions: int
    hidden: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, specs.position_embedding(self.positions, self.hidden))

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
class CrossEntropyCost(SimpleCost):
    """The loss of logits whose (padded) vocabulary x splits. Their gradient takes their place."""

    vocabulary: int

    def _sizes(self, walk: Walk, tokens: int) -> tuple[int, int, int]:
        """Return the bytes of the logits and of the same in float32, and the number of blocks."""
        columns = self.vocabulary // walk.sizes.x
        return tokens * columns * walk.element_bytes, tokens * columns * 4, -(-tokens // limits.block_rows(columns))

    async def forward(self, walk: Walk) -> None:
        self.forward_of(walk, walk.tokens)

    async def backward(self, walk: Walk) -> None:
        self.backward_of(walk, walk.tokens)

    def forward_of(self, walk: Walk, tokens: int) -> None:
        """Compute the loss of some of the tokens."""
        logits, wide, blocks = self._sizes(walk, tokens)
        cast = casts(logits, wide)
        walk.compute(moved=logits)
        walk.do("all_reduce", "x", tokens * STATISTIC)
        walk.scratch(wide // blocks)
        elementwise(walk, logits + (4 + 2 * cast) * wide, (4 + cast) * blocks, compiled=(logits, blocks))
        walk.do("all_reduce", "x", 2 * tokens * STATISTIC)

    def backward_of(self, walk: Walk, tokens: int) -> None:
        """Compute the gradient of some of the tokens' logits."""
        logits, wide, blocks = self._sizes(walk, tokens)
        compiled = 2 * logits, blocks
        if walk.element_bytes == 4:
            elementwise(walk, 6 * wide, 3 * blocks, compiled)
            return
        walk.scratch(wide // blocks)
        elementwise(walk, 2 * logits + 8 * wide, 5 * blocks, compiled)
