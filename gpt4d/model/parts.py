"""Parts and units of a model, the tensors between them, and the spec of a model. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layout import CHUNK, Layout

STREAM = "stream"
EXPERTS = "model.experts"  # the number of experts of a block, in the user's terms
BLOCKS = "blocks"  # the layer of a model that consists of its blocks


class Part(NamedTuple):
    """Consecutive layers of a model that form a model chunk of a stage."""

    begins: bool  # has the layers before the blocks, which take the batch
    blocks: Sequence[int]  # indices of its blocks in the model
    ends: bool  # has the layers behind the blocks, which compute the loss


@dataclass(frozen=True)
class EdgeTensor:
    """A tensor that one unit produces and later units use. It crosses an edge if they are on different stages.

    Attributes:
        layout: the layout on the grid of each stage.
        shape: its global shape for (samples, length).
        kind: an activation has the compute dtype and a gradient; integers are int64 and masks bool, without one.
        sequence_parallel: the layout in training with ``parallel.sequence_parallel``; None: the same.
    """

    layout: Layout
    shape: Callable[[int, int], tuple[int, ...]]
    kind: Literal["activation", "integer", "mask"] = "activation"
    sequence_parallel: Layout | None = None

    @property
    def has_gradient(self) -> bool:
        return self.kind == "activation"

    def dtype(self, activations: str) -> str:
        """Return the name of the dtype, where ``activations`` is the name of the compute dtype."""
        return {"activation": activations, "integer": "int64", "mask": "bool"}[self.kind]

    def nbytes(self, samples: int, length: int, activation_bytes: int) -> int:
        """Return the bytes of the global tensor."""
        element = {"activation": activation_bytes, "integer": 8, "mask": 1}[self.kind]
        return element * math.prod(self.shape(samples, length))


def residual_stream(hidden: int) -> EdgeTensor:
    """Return the residual stream of a text model, [tokens, hidden]."""
    return EdgeTensor(
        Layout(("data", "z"), ("y",)),
        lambda samples, length: (samples * length, hidden),
        sequence_parallel=Layout(("data", "z", CHUNK, "x"), ("y",)),
    )


class Tensors(NamedTuple):
    """Names of tensors, other than the stream, that a unit produces for later units or takes from earlier units."""

    produces: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """The smallest part of a model that a stage can have: a block, all layers before the blocks, or all behind them.

    Attributes:
        name: the prefix of a block's parameters, such as ``blocks.3``; empty for the layers around the blocks.
        part: the unit as a part of the model.
        kind: equal blocks have equal kinds; None for the layers around the blocks.
        tensors: the tensors that the unit produces and takes.
    """

    name: str
    part: Part
    kind: Hashable
    tensors: Tensors

    @property
    def block(self) -> bool:
        """Whether the unit is a block, which may be recomputed, cached and placed on a separate stage."""
        return bool(self.part.blocks)


_STREAM_ALONE = Tensors()


def units_of(
    kinds: Sequence[Hashable],
    first: Tensors = _STREAM_ALONE,
    blocks: Sequence[Tensors] = (),
    last: Tensors = _STREAM_ALONE,
) -> tuple[Unit, ...]:
    """Return the units of a model.

    Args:
        kinds: kinds of the blocks.
        first: the tensors of the layers before the blocks.
        blocks: the tensors of each block; empty if no block has any.
        last: the tensors of the layers behind the blocks.
    """
    return (
        Unit("", Part(True, (), False), None, first),
        *(
            Unit(f"{BLOCKS}.{index}", Part(False, (index,), False), kind, blocks[index] if blocks else _STREAM_ALONE)
            for index, kind in enumerate(kinds)
        ),
        Unit("", Part(False, (), True), None, last),
    )


def joined(units: Sequence[Unit]) -> Part:
    """Return the part that consists of some units."""
    blocks = tuple(index for unit in units for index in unit.part.blocks)
    return Part(units[0].part.begins, blocks, units[-1].part.ends)


def received(part: Sequence[Unit], tensors: Mapping[str, EdgeTensor]) -> tuple[str, ...]:
    """Return the names of the ``tensors`` between units that a part takes from earlier parts."""
    produced = {name for unit in part for name in unit.tensors.produces}
    used = dict.fromkeys(name for unit in part for name in unit.tensors.uses if name not in produced)
    streams = STREAM in tensors and not part[0].part.begins
    return ((STREAM,) if streams else ()) + tuple(used)


class ModelSpec(LayerSpec):
    """The spec of a model, or of parts of one. A subclass is a frozen dataclass.

    Its layer ``blocks`` consists of the blocks of all parts, by their indices.
    """

    config: Any  # the settings of the family
    parts: tuple[Part, ...]

    def of_parts(self, parts: Sequence[Part]) -> ModelSpec:
        """Return the spec of some parts."""
        return replace(self, parts=tuple(parts))  # type: ignore[type-var]

    def compute(self, model: BoundLayer, part: Part, received: Mapping[str, Tensor], *batch: Any) -> dict[str, Any]:
        """Return the tensors that a part produces for later parts by name, or the ``loss`` of the last part.

        Args:
            model: the layer of this spec.
            part: one of ``parts``.
            received: the tensors that earlier parts have produced for this one.
            batch: a microbatch.
        """
        raise NotImplementedError

    def planned_batch(self, tensor: Callable[..., Tensor], samples: int, length: int) -> tuple[Tensor, ...]:
        """Return the batch that ``compute`` takes, of tensors ``tensor(shape, dtype)``."""
        raise NotImplementedError
