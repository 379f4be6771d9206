"""The cost of a block of residual branches, from those of its layers. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpt4d.model.costs import LayerNormCost
from gpt4d.model.description import LayerCost, Walk
from gpt4d.model.product_costs import LinearCost
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights


@dataclass(frozen=True)
class ResidualBlock:
    """Residual branches one after another, ``x + branch(x)`` each, on a stream of ``features`` that y splits.

    Under activation checkpointing only the block's input is kept, and the block is computed again in the backward up
    to the input of its last product. ``dropout``: a mask is applied to each branch's output, which takes the last
    product to compute again as well.
    """

    branches: tuple[Sequence[LayerCost], ...]
    features: int
    dropout: bool = False

    @cached_property
    def _layers(self) -> list[LayerCost]:
        return [layer for branch in self.branches for layer in branch]

    @property
    def linears(self) -> list[LinearCost]:
        return [layer for layer in self._layers if isinstance(layer, LinearCost)]

    def parameters(self) -> dict[str, ParameterSpec]:
        return {name: spec for layer in self._layers for name, spec in layer.parameters().items()}

    def weights(self) -> LayerWeights:
        uses = [layer.weights() for layer in self._layers]
        again = uses if self.dropout else uses[:-1]
        return LayerWeights(
            tuple(name for use in uses for name in use.forward),
            tuple(name for use in again for name in use.recomputation),
            tuple(name for use in reversed(uses) for name in reversed(use.backward)),
        )

    def flops(self, length: int) -> float:
        return sum(layer.flops(length) for layer in self._layers)

    def _stream_bytes(self, walk: Walk) -> int:
        return walk.stream_tokens * (self.features // walk.sizes.y) * walk.element_bytes

    async def forward(self, walk: Walk, keep: bool = True, recomputing: bool = False) -> None:
        x = self._stream_bytes(walk)
        for index, branch in enumerate(self.branches):
            ends = recomputing and index == len(self.branches) - 1
            kept = 0  # bytes that the layer before has left
            for layer in branch:
                before = walk.held
                if ends and not self.dropout and layer is branch[-1]:
                    assert isinstance(layer, LinearCost), "a residual branch ends with a product"
                    await layer.take_input(walk)
                else:
                    await layer.forward(walk)
                if not keep:
                    walk.release(kept)
                    kept = walk.held - before + kept
            if ends:
                walk.release(x if self.dropout else 0)  # the output, which the backward does not need
                return
            walk.hold(x)
            walk.compute(moved=3 * x)
            walk.release(x)
            if not keep:
                walk.release(kept - x)
                walk.release(x if index else 0)  # the stream between this branch and the one before

    def gather_gradient(self, walk: Walk) -> object:
        """Start what precedes a recomputation: the last product's gradient is gathered, unless a mask comes before."""
        product = self.branches[-1][-1]
        assert isinstance(product, LinearCost), "a residual branch ends with a product"
        return None if self.dropout else product.gather_gradient(walk)

    async def backward(self, walk: Walk, gathering: object = None) -> None:
        x = self._stream_bytes(walk)
        for branch in reversed(self.branches):
            *inner, product = branch
            # The gradient of the output is that of the stream too: it stays.
            assert isinstance(product, LinearCost), "a residual branch ends with a product"
            await product.backward(walk, keep_gradient=True, gathering=gathering)
            gathering = None
            for layer in reversed(inner):
                await layer.backward(walk)
            if not isinstance(branch[0], LayerNormCost):
                walk.hold(x)  # the first layer has released its input, the stream, which is released below
            walk.compute(moved=3 * x)
            walk.release(x)
        walk.release(len(self.branches) * x)  # the inputs of the branches
