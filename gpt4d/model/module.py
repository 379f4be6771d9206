"""Models as torch modules."""

from collections.abc import Mapping
from typing import Any

import torch

from gpt4d.model.parts import Part
from gpt4d.model.spec import ModelSpec
from gpt4d.parallel.layers.module import Layer


class Model(Layer):
    """A model, or parts of one. Its parameters are uninitialized until gpt4d.model.init.initialize."""

    spec: ModelSpec

    def compute(self, part: Part, received: Mapping[str, torch.Tensor], *batch: Any) -> dict[str, torch.Tensor]:
        """Return the tensors that a part produces for later parts, or the ``loss`` of the last part.

        Args:
            part: a part of this module.
            received: the tensors that earlier parts have produced for this one.
            batch: additional arguments of the spec's ``compute``.
        """
        return self.spec.compute(self, part, received, *batch)

    def loss_sum(self, *batch: Any) -> torch.Tensor:
        """Return the loss of a full model, summed, not averaged, over this rank's samples."""
        (part,) = self.spec.parts
        return self.compute(part, {}, *batch)["loss"]
