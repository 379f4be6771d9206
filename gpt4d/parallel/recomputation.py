"""Inputs of products that the backward computes again instead of keeping them: selective activation checkpointing.

An elementwise function or a norm takes little time, and its own backward keeps its input anyway. With
``train.activation_checkpointing=selective`` its output lives no longer than the product that uses it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Recomputable(NamedTuple):
    """A tensor, and the function that computes it again, without a gradient."""

    value: Any
    again: Callable[[], Any]


def recomputable(context: Any, function: Callable[[Any], Any], x: Any) -> Any:
    """Return ``function(x)``, the input of a product; a product does not save an input that is recomputable.

    Args:
        context: the context of the layers. It decides whether the input is recomputable.
        function: elementwise.
        x: its input, which its backward saves.
    """
    out = function(x)
    return Recomputable(out, partial(function, x.detach())) if context.recomputes_inputs else out
