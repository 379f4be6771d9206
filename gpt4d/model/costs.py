"""The cost of each layer type, written once: parameters, FLOPs, bytes moved, collectives and memory. No torch here.

Those of products are in product_costs.py, of attention in attention_costs.py, of layers of pictures in conv_costs.py.

Descriptions are made of these. gpt4d.model.description.LayerCost states what ``forward`` and ``backward`` hold. Both
are coroutines that take their turns where the layer does (gpt4d.parallel.turns).
Tests compare them with what a run counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gpt4d.model.description import LayerCost, Walk, per_walk
from gpt4d.parallel.layers import activations, loss, norm
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec, TokenEmbeddingSpec
from gpt4d.parallel.layers.norm import LayerNormSpec, RMSNormSpec
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights
from gpt4d.parallel.symbolic import SymbolicTensor

FLOAT32 = "float32"
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

    ``adds``: it computes the sum of the stream that it takes, and of the stream's gradients.
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


class NormTensors(NamedTuple):
    """Tensors of a norm on one device."""

    x: SymbolicTensor  # the input
    weight: SymbolicTensor  # or the bias
    row: SymbolicTensor  # a statistic of each row
    parts: SymbolicTensor  # two statistics of each row from each rank of y


@dataclass(frozen=True)
class StreamNormCost(NormCost):
    """A norm over features of the residual stream, which y splits."""

    name: str
    spec: LayerNormSpec | RMSNormSpec
    branch: bool = True

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, self.spec.parameters())

    @per_walk
    def tensors(self, walk: Walk) -> NormTensors:
        """Return the tensors of the norm."""
        tokens, features, y = walk.stream_tokens, self.spec.features // walk.sizes.y, walk.sizes.y
        x = SymbolicTensor(walk, (tokens, features), walk.dtype)
        weight, row, parts = (x.like(shape, FLOAT32) for shape in ((features,), (tokens,), (y, 2, tokens)))
        return NormTensors(x, weight, row, parts)


@dataclass(frozen=True)
class LayerNormCost(StreamNormCost):
    """LayerNorm over features that y splits."""

    async def forward(self, walk: Walk, added: bool = False) -> None:
        x, weight, row, parts = self.tensors(walk)
        branch, statistics = x if added else None, 2 * row.nbytes
        walk.hold(x.nbytes + statistics)
        if walk.sizes.y == 1:
            norm.layer_norm(x, branch, weight, weight, 0.0)
            return
        norm.mean_and_variance(x, branch)
        walk.do("all_gather", "y", statistics)
        norm.combined_statistics(parts, 0.0)
        norm.normalized(x, row, row, weight, weight)

    def again(self, walk: Walk) -> None:
        """Compute the output once more, from the statistics if it takes a collective to find them."""
        x, weight, row, _ = self.tensors(walk)
        if walk.sizes.y == 1:
            norm.layer_norm(x, None, weight, weight, 0.0)
        else:
            norm.normalized(x, row, row, weight, weight)

    async def backward(self, walk: Walk) -> None:
        x, weight, row, _ = self.tensors(walk)
        d_stream = x if self.branch else None
        if walk.sizes.y == 1:
            norm.layer_norm_gradients(x, d_stream, x, weight, weight, row, row)
        else:
            sums = norm.sums_of_gradient(x, x, row, row, weight)
            walk.do("all_reduce", "y", sums.nbytes)
            norm.split_layer_norm_gradients(x, d_stream, x, row, row, weight, norm.mean_of(sums, 1))
        self.end_backward(walk, x.nbytes, 2 * row.nbytes)


@dataclass(frozen=True)
class RMSNormCost(StreamNormCost):
    """RMSNorm over features that y splits."""

    async def forward(self, walk: Walk, added: bool = False) -> None:
        x, weight, row, _ = self.tensors(walk)
        branch = x if added else None
        walk.hold(x.nbytes + row.nbytes)
        if walk.sizes.y == 1:
            norm.rms_norm(x, branch, weight, 0.0)
            return
        _, squares = norm.sum_of_squares(x, branch)
        walk.do("all_reduce", "y", squares.nbytes)
        norm.reciprocal_root(squares, 1, 0.0)
        norm.scaled(x, row, weight)

    def again(self, walk: Walk) -> None:
        """Compute the output once more, from the statistics."""
        x, weight, row, _ = self.tensors(walk)
        norm.scaled(x, row, weight)

    async def backward(self, walk: Walk) -> None:
        x, weight, row, _ = self.tensors(walk)
        d_stream = x if self.branch else None
        if walk.sizes.y == 1:
            norm.rms_norm_gradients(x, d_stream, x, row, weight)
        else:
            sums = norm.sum_of_rms_gradient(x, x, row, weight)
            walk.do("all_reduce", "y", sums.nbytes)
            norm.split_rms_norm_gradients(x, d_stream, x, row, weight, norm.mean_of(sums, 1))
        self.end_backward(walk, x.nbytes, row.nbytes)


@dataclass(frozen=True)
class ActivationCost(SimpleCost):
    """An elementwise function of features that ``axis`` splits, such as SiLU; a gated one halves them.

    ``biased``: it is the GELU of a linear layer's output, and computes the gradient of the layer's bias.
    """

    in_features: int
    out_features: int
    axis: str | None = "x"
    positions: int | None = None  # rows of a sample; None: its tokens
    biased: bool = False

    @per_walk
    def _tensors(self, walk: Walk) -> tuple[SymbolicTensor, SymbolicTensor, SymbolicTensor]:
        """Return the input, the output and the bias of the layer before."""
        count, size = rows(walk, self.positions), walk.size(self.axis)
        x = SymbolicTensor(walk, (count, self.in_features // size), walk.dtype)
        return x, x.like((count, self.out_features // size)), x.like((self.in_features // size,), FLOAT32)

    async def forward(self, walk: Walk) -> None:
        walk.hold(self._tensors(walk)[1].nbytes)
        self.again(walk)

    def again(self, walk: Walk) -> None:
        """Compute the output once more."""
        x, out, _ = self._tensors(walk)
        walk.compute(moved=x.nbytes + out.nbytes)

    async def backward(self, walk: Walk) -> None:
        x, out, bias = self._tensors(walk)
        walk.hold(x.nbytes)
        if self.biased:
            activations.gelu_gradients(out, x, bias)
        else:
            walk.compute(moved=2 * x.nbytes + out.nbytes)
        walk.release(x.nbytes + out.nbytes)


@dataclass(frozen=True)
class GatedCost(SimpleCost):
    """SwiGLU of two times ``features``, which x splits."""

    features: int

    @per_walk
    def _tensors(self, walk: Walk) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Return the input and the output."""
        features = self.features // walk.sizes.x
        x = SymbolicTensor(walk, (walk.tokens, 2, features), walk.dtype)
        return x, x.like((walk.tokens, features))

    async def forward(self, walk: Walk) -> None:
        walk.hold(self._tensors(walk)[1].nbytes)
        self.again(walk)

    def again(self, walk: Walk) -> None:
        """Compute the output once more."""
        activations.swiglu(self._tensors(walk)[0])

    async def backward(self, walk: Walk) -> None:
        x, out = self._tensors(walk)
        walk.hold(x.nbytes)
        activations.swiglu_gradient(out, x)
        walk.release(x.nbytes + out.nbytes)


@dataclass(frozen=True)
class TokenEmbeddingCost(SimpleCost):
    """Rows of a table whose vocabulary x splits, summed over x."""

    name: str
    spec: TokenEmbeddingSpec

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, self.spec.parameters())

    def weights(self) -> LayerWeights:
        return LayerWeights(forward=(f"{self.name}.weight",))

    async def forward(self, walk: Walk) -> None:
        x = walk.tokens * (self.spec.hidden // walk.sizes.y) * walk.element_bytes
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
        local_hidden, e = self.spec.hidden // walk.sizes.y, walk.element_bytes
        table = self.spec.rows // walk.sizes.x * local_hidden * MASTER_BYTES
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
    spec: PositionEmbeddingSpec

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, self.spec.parameters())

    def _bytes(self, walk: Walk) -> int:
        return walk.stream_tokens * (self.spec.hidden // walk.sizes.y) * walk.element_bytes

    async def forward(self, walk: Walk) -> None:
        x = self._bytes(walk)
        walk.hold(x)
        walk.compute(moved=2 * x, operations=2)  # the vectors are expanded, not copied for each sample
        walk.release(x)

    async def backward(self, walk: Walk) -> None:
        gradient = self.spec.positions * (self.spec.hidden // walk.sizes.y) * MASTER_BYTES
        walk.hold(gradient)
        walk.compute(moved=self._bytes(walk) + 3 * gradient, operations=2)
        walk.release(gradient)
        walk.add_gradient(f"{self.name}.weight")


@dataclass(frozen=True)
class CrossEntropyCost(SimpleCost):
    """The loss of logits whose (padded) vocabulary x splits. Their gradient takes their place."""

    vocabulary: int

    async def forward(self, walk: Walk) -> None:
        self.forward_of(walk, walk.tokens)

    async def backward(self, walk: Walk) -> None:
        self.backward_of(walk, walk.tokens)

    @per_walk
    def _tensors(self, walk: Walk, tokens: int) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Return logits, and a number for each token."""
        logits = SymbolicTensor(walk, (tokens, self.vocabulary // walk.sizes.x), walk.dtype)
        return logits, logits.like((tokens,), FLOAT32)

    def forward_of(self, walk: Walk, tokens: int) -> None:
        """Compute the loss of some of the tokens."""
        logits, row = self._tensors(walk, tokens)
        loss.largest_logits(logits, 0)
        walk.do("all_reduce", "x", row.nbytes)
        loss.sums_of_exponentials(logits, row, 0)
        walk.do("all_reduce", "x", 2 * row.nbytes)

    def backward_of(self, walk: Walk, tokens: int) -> None:
        """Compute the gradient of some of the tokens' logits."""
        logits, row = self._tensors(walk, tokens)
        loss.softmax_(logits, row, row, 0)
