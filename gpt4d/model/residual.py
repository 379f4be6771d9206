"""The costs of blocks, from those of their layers. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from gpt4d.model.conv_costs import ConcatenationCost, ForkCost
from gpt4d.model.costs import NormCost, SequenceCost, rows
from gpt4d.model.description import LayerCost, Walk
from gpt4d.model.product_costs import ProductCost
from gpt4d.parallel.order import LayerWeights


@dataclass(frozen=True)
class ProductBlock(SequenceCost):
    """A block of a single product, whose input is all that its backward needs: nothing is computed again.

    ``fork``: of its output.
    """

    product: ProductCost
    fork: ForkCost | None = None

    @property
    def layers(self) -> Sequence[LayerCost]:
        return self.products

    @property
    def products(self) -> list[ProductCost]:
        return [self.product]

    def weights(self) -> LayerWeights:
        return super().weights()._replace(recomputation=())

    async def forward(self, walk: Walk, keep: bool = True, recomputing: bool = False) -> None:
        await (self.product.take_input(walk) if recomputing else self.product.forward(walk))

    def gather_gradient(self, walk: Walk) -> object:
        return self.product.gather_gradient(walk)

    async def backward(self, walk: Walk, gathering: object = None) -> None:
        if self.fork:
            await self.fork.backward(walk)
        await self.product.backward(walk, gathering=gathering)


def _adds(branch: Sequence[LayerCost]) -> bool:
    """Return whether the norm before a branch adds what goes past the branch."""
    return isinstance(branch[0], NormCost) and branch[0].adds


@dataclass(frozen=True)
class ResidualBlock(SequenceCost):
    """Residual branches one after another, ``x + branch(x)`` each, on a stream of ``features`` that ``axis`` splits.

    Under activation checkpointing only the block's inputs are kept, and the block is computed again in the backward up
    to the input of its last product. ``concatenation``: of the stream and another tensor, before the first branch.
    ``shortcut``: takes the place of ``x`` in the sum behind the first branch, whose input has other features.
    ``fork``: of the output.
    """

    branches: tuple[Sequence[LayerCost], ...]
    features: int
    axis: str = "y"
    positions: int | None = None  # of a sample; None: its tokens
    concatenation: ConcatenationCost | None = None
    shortcut: ProductCost | None = None
    in_features: int | None = None  # of the first branch; None: ``features``
    fork: ForkCost | None = None

    @cached_property
    def layers(self) -> Sequence[LayerCost]:
        first: list[LayerCost] = [self.shortcut] if self.shortcut else []
        return [*first, *(layer for branch in self.branches for layer in branch)]

    @property
    def products(self) -> list[ProductCost]:
        return [layer for layer in self.layers if isinstance(layer, ProductCost)]

    def weights(self) -> LayerWeights:
        recomputation = tuple(name for layer in self.layers[:-1] for name in layer.weights().recomputation)
        return super().weights()._replace(recomputation=recomputation)

    def _bytes(self, walk: Walk, features: int) -> int:
        count = walk.stream_tokens if self.positions is None else rows(walk, self.positions)
        return count * (features // walk.size(self.axis)) * walk.element_bytes

    def _streams(self, walk: Walk) -> Iterator[tuple[Sequence[LayerCost], ProductCost | None, int, int]]:
        """Yield each branch with the shortcut beside it, and the bytes of the stream before and after it."""
        x = self._bytes(walk, self.features)
        before = self._bytes(walk, self.in_features or self.features)
        for index, branch in enumerate(self.branches):
            yield branch, None if index else self.shortcut, x if index else before, x

    @property
    def _last(self) -> ProductCost:
        product = self.branches[-1][-1]
        assert isinstance(product, ProductCost), "a residual branch ends with a product"
        return product

    async def forward(self, walk: Walk, keep: bool = True, recomputing: bool = False) -> None:
        if self.concatenation:
            await self.concatenation.forward(walk)
            if recomputing or not keep:
                walk.hold(self.concatenation.stream_bytes(walk))  # the block's input stays
        for index, (branch, shortcut, before, x) in enumerate(self._streams(walk)):
            ends = recomputing and branch is self.branches[-1]
            if shortcut:
                await shortcut.forward(walk)
            kept = 0  # bytes that the layer before has left
            for layer in branch:
                held = walk.held
                if ends and layer is self._last:
                    await self._last.take_input(walk)
                elif layer is branch[0] and _adds(branch):
                    await cast(Any, layer).forward(walk, added=index > 0)
                else:
                    await layer.forward(walk)
                if not keep:
                    walk.release(kept)
                    kept = walk.held - held + kept
            if ends:  # without the output, which the backward does not need
                walk.release(x if shortcut else 0)
                return
            walk.hold(x)
            if index + 1 == len(self.branches) or not _adds(self.branches[index + 1]):  # else the next norm adds
                walk.compute(moved=3 * x)
            walk.release(2 * x if shortcut else x)
            if not keep:
                walk.release(kept - x)
                input_of_block = branch is self.branches[0] and not self.concatenation
                walk.release(0 if input_of_block else before)

    def gather_gradient(self, walk: Walk) -> object:
        """Start what precedes a recomputation: the last product's gradient is gathered."""
        return self._last.gather_gradient(walk)

    async def backward(self, walk: Walk, gathering: object = None) -> None:
        if self.fork:
            await self.fork.backward(walk)
        inputs = 0  # bytes of the branches' inputs
        for branch, shortcut, before, _ in reversed(list(self._streams(walk))):
            *inner, product = branch
            # The gradient of the output is that of the stream too: it stays.
            assert isinstance(product, ProductCost), "a residual branch ends with a product"
            await product.backward(walk, keep_gradient=True, gathering=gathering)
            gathering = None
            for layer in reversed(inner):
                await layer.backward(walk)
            if not isinstance(branch[0], NormCost):
                walk.hold(before)  # the first layer has released its input, the stream, which is released below
            if shortcut:
                await shortcut.backward(walk)
                walk.hold(before)  # it has released its input as well
            if not _adds(branch):
                walk.compute(moved=3 * before)
            walk.release(before)
            inputs += before
        walk.release(inputs)
        if self.concatenation:
            walk.release(self.concatenation.stream_bytes(walk) if walk.recomputed else 0)
            await self.concatenation.backward(walk)
