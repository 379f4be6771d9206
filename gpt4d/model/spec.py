"""The spec of a model, or of parts of one. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt4d.model.parts import Part
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec


class ModelSpec(LayerSpec):
    """The spec of a model, or of parts of one. A subclass is a frozen dataclass.

    Its layer ``blocks`` consists of the blocks of all parts, by their indices.
    """

    config: Any  # the settings of the family
    parts: tuple[Part, ...]

    def of_parts(self, parts: Sequence[Part]) -> ModelSpec:
        """Return the spec of some parts."""
        this: Any = self
        return replace(this, parts=tuple(parts))

    def compute(self, model: BoundLayer, part: Part, received: Mapping[str, Any], *batch: Any) -> dict[str, Any]:
        """Return the tensors that a part produces for later parts by name, or the ``loss`` of the last part.

        Args:
            model: the layer of this spec.
            part: one of ``parts``.
            received: the tensors that earlier parts have produced for this one.
            batch: a microbatch.
        """
        raise NotImplementedError

    def planned_batch(self, tensor: Callable[..., Any], samples: int, length: int) -> tuple[Any, ...]:
        """Return the batch that ``compute`` takes, of tensors ``tensor(shape, dtype)``."""
        raise NotImplementedError
