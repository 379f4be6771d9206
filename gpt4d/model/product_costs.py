"""The costs of products with streamed weights: linear layers, and what convolutions share with them. No torch here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gpt4d.model.costs import MASTER_BYTES, prefixed, rows
from gpt4d.model.description import Walk, per_walk
from gpt4d.parallel import limits
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import LayerWeights


class GlobalSizes(NamedTuple):
    """A product over all devices: elements of the input and the output of one sample, and of the weight."""

    input: int
    output: int
    weight: int


class ProductSizes(NamedTuple):
    """A product on one device. Input and output are whole: gathered, or not scattered yet."""

    in_bytes: int
    out_bytes: int
    weight: int  # elements
    flops: float


class Recomputed(Protocol):
    """A layer whose output is computed again where a product does not keep it (gpt4d.parallel.recomputation)."""

    def again(self, walk: Walk) -> None:
        """Compute the output once more, beside what is held."""


class ProductCost(ABC):
    """The common part of linear layers and convolutions (gpt4d.parallel.layers.product).

    A layer whose input is data (``input_gradient`` false) neither gathers its weight in the backward nor reduces.
    ``source``: the layer that computes its input, if selective activation checkpointing computes it again.
    """

    name: str
    spec: LinearSpec | Conv2dSpec
    input_gradient: bool
    source: Recomputed | None

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by their names in this layer."""
        return prefixed(self.name, self.spec.parameters())

    @abstractmethod
    def flops(self, length: int) -> float:
        """Return the floating-point operations of one forward of one sample, over all devices."""

    @property
    def _weight(self) -> str:
        return f"{self.name}.weight"

    def weights(self) -> LayerWeights:
        names = (self._weight,)
        return LayerWeights(names, names, names if self.input_gradient else ())

    @property
    @abstractmethod
    def split(self) -> Axes:
        """The axes that split the features of its input and of its output."""

    @abstractmethod
    def global_sizes(self, length: int) -> GlobalSizes:
        """Return its sizes over all devices; ``length``: tokens of a sample."""

    @abstractmethod
    def sizes(self, walk: Walk) -> ProductSizes:
        """Return its sizes on one device."""

    @abstractmethod
    def _split_sides(self, walk: Walk) -> tuple[str | None, str | None]:
        """Return what the other axis may split of the input and of the output: "tokens", "features" or nothing."""

    def _read_input(self, walk: Walk) -> None:  # noqa: B027 – most products have none
        """Compute what precedes a product with the input."""

    def _write_input_gradient(self, walk: Walk) -> None:  # noqa: B027 – most products have none
        """Compute what follows the product that the input's gradient comes from."""

    def _write_weight_gradient(self, walk: Walk, nbytes: int) -> None:  # noqa: B027 – most products have none
        """Compute what follows the product that the weight's gradient comes from."""

    def _adds_gradient(self, walk: Walk) -> bool:
        """Return whether the product that the weight's gradient comes from adds it to an earlier sum."""
        return False

    @per_walk
    def _splits(self, walk: Walk) -> tuple[str | None, str | None]:
        """Return what is split of the input, which is gathered, and of the output, which is scattered."""
        before, after = self._split_sides(walk)
        contracted, produced = self.split
        return before if walk.size(produced) > 1 else None, after if walk.size(contracted) > 1 else None

    def _keeps_input(self, walk: Walk) -> bool:
        return not (walk.recomputes_inputs and self.source and not self._splits(walk)[0])

    async def take_input(self, walk: Walk) -> None:
        """Begin a forward: keep the input, gathered if it is split."""
        before, after = self._splits(walk)
        if before:
            whole, axis = self.sizes(walk).in_bytes, self.split.produced
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
        in_bytes, out_bytes, weight, flops = self.sizes(walk)
        contracted, (_, after) = self.split.contracted, self._splits(walk)
        walk.gather(self._weight)
        self._read_input(walk)
        walk.hold(out_bytes)
        walk.compute(flops, in_bytes + weight * walk.element_bytes + out_bytes)
        walk.multiplied()
        if after == "features":
            walk.scratch(out_bytes)
            walk.compute(moved=2 * out_bytes)
        part = out_bytes // walk.size(contracted) if after else out_bytes
        walk.hold(part if after else 0)
        await walk.turn(walk.start("reduce_scatter" if after else "all_reduce", contracted, out_bytes))
        walk.release(out_bytes if after else 0)
        if self.spec.bias and walk.size(contracted) > 1:  # otherwise the product adds it
            walk.compute(moved=2 * part)
        walk.release(0 if self._keeps_input(walk) else in_bytes)

    def gather_gradient(self, walk: Walk) -> object:
        """Start to gather the gradient of an output that was scattered, as the backward begins; None for another."""
        contracted, (_, after) = self.split.contracted, self._splits(walk)
        if not after:
            return None
        out_bytes = self.sizes(walk).out_bytes
        walk.hold(out_bytes)
        return walk.start("all_gather", contracted, out_bytes // walk.size(contracted))

    async def backward(self, walk: Walk, keep_gradient: bool = False, gathering: object = None) -> None:
        """Walk through the backward.

        Args:
            walk: the device.
            keep_gradient: the gradient of the output stays held, since the residual stream needs it too.
            gathering: what ``gather_gradient`` has started.
        """
        in_bytes, out_bytes, weight, flops = self.sizes(walk)
        (contracted, produced), (before, after) = self.split, self._splits(walk)
        pending = None
        if after:
            if gathering is None:
                await walk.turn(self.gather_gradient(walk))
            else:
                walk.wait(gathering)
            if after == "features":
                walk.scratch(out_bytes)
                walk.compute(moved=2 * out_bytes)
            walk.release(0 if keep_gradient else out_bytes // walk.size(contracted))
        dropped = walk.recomputed
        if self.source and not self._keeps_input(walk):
            dropped = True
            walk.hold(in_bytes)
            self.source.again(walk)
        if self.input_gradient:
            walk.gather(self._weight)
            walk.hold(in_bytes)
            walk.compute(flops, out_bytes + weight * walk.element_bytes + in_bytes)
            walk.multiplied()
            self._write_input_gradient(walk)
            if before == "features":
                walk.scratch(in_bytes)
                walk.compute(moved=2 * in_bytes)
            if before:
                walk.hold(in_bytes // walk.size(produced))
            pending = walk.start("reduce_scatter" if before else "all_reduce", produced, in_bytes)
            if not walk.overlap.all_reduce:
                walk.wait(pending)
                pending = None

        def weight_gradient() -> None:
            gradient, added = weight * MASTER_BYTES, self._adds_gradient(walk)
            walk.hold(0 if added else gradient)
            self._read_input(walk)
            walk.compute(flops, in_bytes + out_bytes + gradient * (2 if added else 1))
            self._write_weight_gradient(walk, gradient)
            walk.scatter(self._weight, added)

        walk.compute_weight_gradient(weight_gradient, in_bytes + out_bytes)
        if self.spec.bias:
            if self.spec.bias_gradient:
                walk.compute(moved=out_bytes)
            walk.add_gradient(f"{self.name}.bias")
        walk.release(out_bytes if after or not keep_gradient else 0)
        walk.release(in_bytes if dropped else 0)  # a recomputed input is dropped once it has been read
        await walk.turn(pending)
        walk.release(0 if dropped else in_bytes)
        if before and self.input_gradient:
            walk.release(in_bytes)  # the gradient before it was scattered
        if before == "features":
            walk.release(in_bytes // walk.size(produced))  # what the attention core has kept


@dataclass(frozen=True)
class LinearCost(ProductCost):
    """A linear layer (4D paper, Algorithm 1). ``tied`` names another layer's weight [out, in] that it uses instead."""

    name: str
    spec: LinearSpec
    tied: str | None = None
    input_gradient: bool = True
    positions: int | None = None  # rows of a sample; None: its tokens
    source: Recomputed | None = None

    @property
    def _weight(self) -> str:
        return f".{self.tied}" if self.tied else f"{self.name}.weight"

    def parameters(self) -> dict[str, ParameterSpec]:
        return {} if self.tied else super().parameters()

    @property
    def split(self) -> Axes:
        return self.spec.split

    def flops(self, length: int) -> float:
        return 2 * (self.positions or length) * self.global_sizes(length).weight

    def global_sizes(self, length: int) -> GlobalSizes:
        positions, columns = self.positions or length, self.spec.columns
        return GlobalSizes(positions * self.spec.in_features, positions * columns, self.spec.in_features * columns)

    @per_walk
    def sizes(self, walk: Walk) -> ProductSizes:
        k = self.spec.in_features // walk.size(self.split.contracted)
        n = self.spec.columns // walk.size(self.split.produced)
        count, element = rows(walk, self.positions), walk.element_bytes
        return ProductSizes(count * k * element, count * n * element, k * n, 2 * count * (k * n))

    def _write_weight_gradient(self, walk: Walk, nbytes: int) -> None:
        sizes = self.sizes(walk)
        self.convert_factors(walk, sizes.in_bytes, sizes.out_bytes)

    def convert_factors(self, walk: Walk, in_bytes: int, out_bytes: int) -> None:
        """Take the memory in which a CPU converts both factors of the weight's gradient, the first one block by block.

        Args:
            walk: the device.
            in_bytes: bytes of the input.
            out_bytes: bytes of the output's gradient.
        """
        if walk.adds_products or walk.element_bytes == MASTER_BYTES:
            return
        first, second = (out_bytes, in_bytes) if self.tied else (in_bytes, out_bytes)
        wider = MASTER_BYTES // walk.element_bytes
        walk.scratch(wider * second + min(wider * first, MASTER_BYTES * limits.block_rows(1)))

    def _adds_gradient(self, walk: Walk) -> bool:
        return walk.adds_products and walk.has_earlier_sum(self._weight)

    def _split_sides(self, walk: Walk) -> tuple[str | None, str | None]:
        stream, inner = "tokens" if walk.sequence_parallel else None, None
        axis = self.spec.stream_axis
        if self.spec.heads and axis and axis in walk.head_axes(self.spec.heads, axis):
            inner = "features"
        return specs.sides(stream, inner, self.spec.transposed)
