"""The costs of layers of pictures: convolutions, GroupNorm, concatenations, time embeddings. No torch here.

``positions`` are the pixels of one picture, whose channels an axis splits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gpt4d.model.costs import STATISTIC, ActivationCost, NormCost, SequenceCost, SimpleCost, cast, prefixed
from gpt4d.model.description import LayerCost, Walk, per_walk
from gpt4d.model.product_costs import GlobalSizes, LinearCost, ProductCost, ProductSizes, Recomputed
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.layout import ParameterSpec


@dataclass(frozen=True)
class Conv2dCost(ProductCost):
    """A convolution of pictures of ``size`` (height, width)."""

    name: str
    spec: Conv2dSpec
    size: tuple[int, int]
    input_gradient: bool = True
    source: Recomputed | None = None

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.spec.operation.out_size(self.size, self.spec.kernel)

    def flops(self, length: int) -> float:
        return 2 * math.prod(self.out_size) * self.spec.weight_elements

    @property
    def split(self) -> Axes:
        return self.spec.axes

    def global_sizes(self, length: int) -> GlobalSizes:
        spec = self.spec
        return GlobalSizes(
            math.prod(self.size) * spec.in_channels, math.prod(self.out_size) * spec.out_channels, spec.weight_elements
        )

    @per_walk
    def sizes(self, walk: Walk) -> ProductSizes:
        k = self.spec.in_channels // walk.size(self.split.contracted)
        n = self.spec.out_channels // walk.size(self.split.produced)
        element, weight = walk.samples * walk.element_bytes, k * n * math.prod(self.spec.kernel)
        in_bytes, out_bytes = math.prod(self.size) * k * element, math.prod(self.out_size) * n * element
        return ProductSizes(in_bytes, out_bytes, weight, 2 * walk.samples * math.prod(self.out_size) * weight)

    def _split_sides(self, walk: Walk) -> tuple[str | None, str | None]:
        return None, "features" if self.spec.scatter_output else None

    def _enlarge(self, walk: Walk) -> None:
        if self.spec.upsampling > 1:
            in_bytes, large = self.sizes(walk).in_bytes, self.spec.upsampling**2
            walk.scratch(in_bytes * large)
            walk.compute(moved=in_bytes * (1 + large))

    _read_input = _write_input_gradient = _enlarge

    def _write_weight_gradient(self, walk: Walk, nbytes: int) -> None:
        if not walk.has_earlier_sum(self._weight):
            walk.compute(moved=2 * nbytes)  # into the order of the stored weight


@dataclass(frozen=True)
class PicturesCost(SimpleCost):
    """The pictures of a microbatch in the dtype of activations, which every rank of x and y has whole."""

    channels: int
    positions: int

    async def forward(self, walk: Walk) -> None:
        x = walk.samples * self.positions * self.channels * walk.element_bytes
        walk.hold(x)
        walk.compute(moved=2 * x)

    async def backward(self, walk: Walk) -> None:
        """Data has no gradient, and the layer behind has released the pictures."""


@dataclass(frozen=True)
class GroupNormCost(NormCost):
    """GroupNorm over the channels of an activation, or of a concatenation."""

    name: str
    spec: GroupNormSpec
    positions: int
    branch: bool = False
    adds: ClassVar[bool] = False

    def parameters(self) -> dict[str, ParameterSpec]:
        return prefixed(self.name, self.spec.parameters())

    def _bytes(self, walk: Walk) -> tuple[int, int, int]:
        """Return the bytes of the activation, of the same in float32, and of two statistics of each channel."""
        local = walk.samples * (sum(self.spec.channels) // walk.size(self.spec.axis))
        return local * self.positions * walk.element_bytes, local * self.positions * 4, 2 * local * STATISTIC

    def _exchange(self, walk: Walk, kind: str, count: int) -> None:
        """Exchange ``count`` statistics of each group, if the axis cuts groups."""
        if self.spec.is_cut(walk.size(self.spec.axis)):
            walk.do(kind, self.spec.axis, count * walk.samples * self.spec.groups * STATISTIC)

    async def forward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        walk.hold(x + statistics)
        walk.scratch((1 if walk.element_bytes == 4 else 2) * wide)
        cast(walk, x, wide)
        walk.compute(moved=6 * wide, operations=12)
        self._exchange(walk, "all_gather", 3)
        walk.compute(moved=4 * wide, operations=8)
        cast(walk, x, wide)

    async def backward(self, walk: Walk) -> None:
        x, wide, statistics = self._bytes(walk)
        walk.scratch(4 * wide)
        cast(walk, x, wide)
        walk.compute(moved=9 * wide, operations=9)
        self._exchange(walk, "all_reduce", 2)
        walk.compute(moved=11 * wide, operations=8)
        cast(walk, x, wide)
        self.end_backward(walk, x, statistics)


@dataclass(frozen=True)
class ConcatenationCost(SimpleCost):
    """A concatenation of activations along channels that ``axis`` splits: a copy, without communication.

    The first part is the stream, which it replaces. The others stay with the layers that have produced them.
    """

    channels: tuple[int, ...]
    positions: int
    axis: str = "y"

    def _bytes(self, walk: Walk, channels: int) -> int:
        return walk.samples * self.positions * walk.element_bytes * (channels // walk.size(self.axis))

    def stream_bytes(self, walk: Walk) -> int:
        """Return the bytes of the stream before the concatenation."""
        return self._bytes(walk, self.channels[0])

    async def forward(self, walk: Walk) -> None:
        whole = self._bytes(walk, sum(self.channels))
        walk.hold(whole)
        walk.compute(moved=2 * whole)
        walk.release(self.stream_bytes(walk))

    async def backward(self, walk: Walk) -> None:
        whole = self._bytes(walk, sum(self.channels))
        walk.hold(whole)  # the gradients of all parts: those of skips stay until their producers' backward
        walk.compute(moved=2 * whole, operations=len(self.channels))
        walk.release(whole)


@dataclass(frozen=True)
class ForkCost(SimpleCost):
    """An activation that the next layer and a concatenation take: in the backward, their gradients are added up."""

    channels: int
    positions: int
    axis: str = "y"

    async def forward(self, walk: Walk) -> None:
        """Both take the same memory."""

    async def backward(self, walk: Walk) -> None:
        x = walk.samples * self.positions * (self.channels // walk.size(self.axis)) * walk.element_bytes
        walk.compute(moved=3 * x)
        walk.release(x)


@dataclass(frozen=True)
class TimeEmbeddingCost(SequenceCost):
    """The embedding of timesteps, whole on every rank of x and y (gpt4d.parallel.layers.time_embedding)."""

    channels: int
    hidden: int

    async def forward(self, walk: Walk) -> None:
        sinusoids = walk.samples * self.channels * walk.element_bytes
        walk.hold(sinusoids)
        walk.compute(moved=2 * sinusoids, operations=5)
        await super().forward(walk)

    @cached_property
    def layers(self) -> Sequence[LayerCost]:
        whole = Axes(None, None)
        return (
            LinearCost("up", LinearSpec(self.channels, self.hidden, axes=whole), positions=1, input_gradient=False),
            ActivationCost(self.hidden, self.hidden, axis=None, positions=1),
            LinearCost("down", LinearSpec(self.hidden, self.hidden, axes=whole), positions=1),
        )


@dataclass(frozen=True)
class ScaleShiftCost(SequenceCost):
    """Scales and shifts of channels by a linear layer of the time embedding, which stays with its producer."""

    name: str
    hidden: int
    channels: int
    positions: int
    axis: str

    @cached_property
    def _linear(self) -> LinearCost:
        name = f"{self.name}.linear" if self.name else "linear"
        spec = LinearSpec(self.hidden, self.channels, num_fused=2, axes=Axes(None, self.axis))
        return LinearCost(name, spec, positions=1)

    @property
    def layers(self) -> Sequence[LayerCost]:
        return (self._linear,)

    def _bytes(self, walk: Walk) -> tuple[int, int, int]:
        """Return the bytes of the embedding, of the scales and shifts, and of the activation."""
        local = walk.samples * (self.channels // walk.size(self.axis)) * walk.element_bytes
        return walk.samples * self.hidden * walk.element_bytes, 2 * local, local * self.positions

    async def forward(self, walk: Walk) -> None:
        embedding, _, x = self._bytes(walk)
        walk.hold(embedding)
        walk.compute(moved=2 * embedding)
        await self._linear.forward(walk)
        walk.hold(x)
        walk.compute(moved=2 * x, operations=2)

    async def backward(self, walk: Walk) -> None:
        embedding, _, x = self._bytes(walk)
        walk.hold(x)
        walk.scratch(x)
        walk.compute(moved=9 * x, operations=9)
        walk.release(2 * x)
        await self._linear.backward(walk)
        walk.compute(moved=5 * embedding, operations=2)
        walk.release(embedding)
        # The scales and shifts and their gradients have the same size: the linear layer has released one of the two.


@dataclass(frozen=True)
class SquaredErrorCost(SimpleCost):
    """The summed squared error of pictures that all ranks of x and y have, in float32."""

    channels: int
    positions: int

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        """Return the bytes of the prediction, and of its errors."""
        elements = walk.samples * self.positions * self.channels
        return elements * walk.element_bytes, elements * 4

    async def forward(self, walk: Walk) -> None:
        predicted, errors = self._bytes(walk)
        cast(walk, predicted, errors)
        walk.hold(errors)
        walk.compute(moved=6 * errors, operations=3)
        walk.release(predicted)

    async def backward(self, walk: Walk) -> None:
        predicted, errors = self._bytes(walk)
        walk.hold(predicted)
        walk.compute(moved=4 * errors, operations=2)
        cast(walk, predicted, errors)
        walk.release(errors)
