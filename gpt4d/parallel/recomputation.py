"""Inputs of products that the backward computes again instead of keeping them: selective activation checkpointing.

An elementwise function or a norm takes little time, and its own backward keeps its input anyway. With
``train.activation_checkpointing=selective`` its output lives no longer than the product that uses it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from gpt4d.parallel.weights import WeightStream


class Recomputable(NamedTuple):
    """A tensor, and the function that computes it again, without a gradient."""

    value: torch.Tensor
    again: Callable[[], torch.Tensor]


def recomputable(
    weights: WeightStream, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor | Recomputable:
    """Return ``function(x)``, the input of a product; a product does not keep one that is recomputable.

    Args:
        weights: the stream that decides whether it is.
        function: elementwise.
        x: its input, which its backward keeps.
    """
    out = function(x)
    return Recomputable(out, partial(function, x.detach())) if weights.recomputes_inputs else out
