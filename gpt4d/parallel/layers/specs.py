"""The parameters of each layer type: names, global shapes and layouts (4D paper, §III). Layers and descriptions use it.

This module does not import torch.
"""

from dataclasses import replace
from typing import TypeVar

from gpt4d.parallel.layout import Layout, ParameterSpec

T = TypeVar("T")


def linear(
    in_features: int,
    out_features: int,
    *,
    transposed: bool = False,
    num_fused: int | None = None,
    bias: bool = True,
    std: float = 0.02,
) -> dict[str, ParameterSpec]:
    """Return weight [in, out] and bias [out] of a linear layer, or [in, num_fused, out] and [num_fused, out].

    Normal: in over y, out over x; transposed: in over x, out over y. z splits the stored rows once more.
    """
    contracted, produced = linear_axes(transposed)
    shape, out = (
        ((out_features,), ((produced,),)) if num_fused is None else ((num_fused, out_features), ((), (produced,)))
    )
    layout = Layout((contracted, "z"), *out)
    specs = {"weight": ParameterSpec((in_features, *shape), layout, std=std, decay=True, streamed=True)}
    if bias:
        specs["bias"] = ParameterSpec(shape, Layout(*out))
    return specs


def linear_axes(transposed: bool) -> tuple[str, str]:
    """Return the axes that split the rows and the columns of a linear layer's weight."""
    return ("x", "y") if transposed else ("y", "x")


def sides(stream: T, inner: T, transposed: bool) -> tuple[T, T]:
    """Return what belongs to a layer's input and to its output, of two things that belong to its sides.

    The input of a normal layer is the residual stream, and so is the output of a transposed one.
    """
    return (inner, stream) if transposed else (stream, inner)


def head_axes(heads: int, x: int, y: int, scatter: bool) -> tuple[str, ...]:
    """Return the axes that split the heads of an attention, outermost first, on a grid with these sizes.

    ``scatter`` (``parallel.scatter_heads``): y splits them too if there are enough.
    """
    return ("x", "y") if scatter and y > 1 and heads % (x * y) == 0 else ("x",)


def token_embedding(rows: int, hidden: int, std: float = 0.02) -> dict[str, ParameterSpec]:
    """Return the table [vocabulary, hidden]: vocabulary over x and, as stored, z; hidden over y."""
    return {"weight": ParameterSpec((rows, hidden), Layout(("x", "z"), ("y",)), std=std, decay=True, streamed=True)}


def position_embedding(positions: int, hidden: int, std: float = 0.02) -> dict[str, ParameterSpec]:
    """Return the table [positions, hidden], hidden over y."""
    return {"weight": ParameterSpec((positions, hidden), Layout((), ("y",)), std=std, decay=True, between_layers=True)}


def layer_norm(features: int) -> dict[str, ParameterSpec]:
    """Return weight and bias [features], features over y."""
    bias = ParameterSpec((features,), Layout(("y",)), between_layers=True)
    return {"weight": replace(bias, mean=1.0), "bias": bias}
