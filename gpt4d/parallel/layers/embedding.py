"""Embeddings of tokens, positions and diffusion timesteps (Nichol & Dhariwal, 2021).

x splits the vocabulary, and z splits each rank's stored rows further. y splits the hidden features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt4d.parallel.kernels import Function, Tensor, kernel, wide_dtype
from gpt4d.parallel.layers.activations import silu
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.layers.sharding import Axes
from gpt4d.parallel.layout import BETWEEN_LAYERS, Layout, ParameterSpec
from gpt4d.parallel.lazy import F, torch


def _rows_bytes(table, ids) -> int:
    """Return the bytes of reading and writing the rows of ``table`` at ``ids``, and of reading the ids."""
    return 2 * math.prod(ids.shape) * table.nbytes // table.shape[0] + ids.nbytes


@kernel(
    lambda table, ids, *_: (table.like((*ids.shape, table.shape[-1])), ids.like(), ids.like(dtype="bool")),
    moved=lambda table, ids, first: _rows_bytes(table, ids),
)
def look_up(table, ids, first: int):
    """Return rows of a table that starts with id ``first``, their local indices, and a mask of other ranks' ids."""
    local = ids - first
    elsewhere = (local < 0) | (local >= len(table))
    local = local.masked_fill_(elsewhere, 0)
    return F.embedding(local, table), local, elsewhere


@kernel(lambda rows, *_: rows)
def clear_(rows, elsewhere):
    """Set the rows of other ranks' ids to zero in place."""
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


@kernel(lambda d_rows, elsewhere, weight: d_rows.like(dtype=weight.dtype), unread=("weight",))
def cleared(d_rows, elsewhere, weight):
    """Return the gradients of rows in the dtype of ``weight``, zero for other ranks' ids."""
    return d_rows.to(weight.dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


@kernel(
    lambda d_rows, local, count, added_to: added_to or d_rows.like((count, d_rows.shape[-1])),
    moved=lambda d_rows, local, count, added_to: (
        3 * d_rows.nbytes + local.nbytes + (0 if added_to else count * d_rows.nbytes // d_rows.shape[0])
    ),
)
def table_gradient(d_rows, local, count: int, added_to):
    """Return the gradient of a table of ``count`` rows, added to ``added_to`` if given."""
    table = d_rows.new_zeros(count, d_rows.shape[-1]) if added_to is None else added_to
    return table.index_add_(0, local.flatten(), d_rows.flatten(0, -2))


@kernel(
    lambda x, *_: x.like(), moved=lambda x, weight, length: 2 * x.nbytes + length * weight.nbytes // weight.shape[0]
)
def add_positions(x, weight, length: int):
    """Return ``x`` [tokens, hidden] with the first ``length`` rows of a table added to each sequence."""
    rows = weight[:length].to(x.dtype).expand(len(x) // length, -1, -1)
    return (x.unflatten(0, (-1, length)) + rows).flatten(0, 1)


@kernel(lambda d_out, weight, *_: weight.like(), unread=("weight",))
def positions_gradient(d_out, weight, length: int):
    """Return the gradient of the table of ``add_positions``: a sum over sequences in the table's dtype."""
    d_rows = d_out.unflatten(0, (-1, length)).sum(0, dtype=weight.dtype)
    return F.pad(d_rows, (0, 0, 0, weight.shape[0] - length))


@kernel(lambda x, *_: x.like(), moved=lambda x, weight, positions: 2 * x.nbytes + _rows_bytes(weight, positions))
def add_rows_at(x, weight, positions):
    """Return ``x`` [tokens, hidden] with the rows of a table at ``positions`` [tokens] added."""
    return x + F.embedding(positions, weight).to(x.dtype)


@kernel(lambda d_out, weight, *_: weight.like(), unread=("weight",))
def rows_at_gradient(d_out, weight, positions):
    """Return the gradient of the table of ``add_rows_at``."""
    return torch.ops.aten.embedding_dense_backward(d_out.to(weight.dtype), positions, weight.shape[0], -1, False)


@kernel(lambda x, *_: x.like())
def multiplied(x, factor: float):
    """Return ``x`` times a factor that is rounded to its dtype."""
    return x * torch.tensor(factor, dtype=x.dtype)


class LookupFunction(Function):
    """Rows of a table. Each rank of x has a contiguous range of the rows, and the results are reduced over x."""

    @staticmethod
    def forward(ctx, weight, ids, weights, scatter: bool):
        table, axis = weights.gather(weight), weights.context.grid.x
        rows, local, elsewhere = look_up(table, ids, axis.index * table.shape[0])
        if axis.size > 1:
            rows = clear_(rows, elsewhere)
        ctx.save_for_backward(local, elsewhere)
        ctx.weight, ctx.weights, ctx.rows, ctx.scatter = weight, weights, table.shape[0], scatter
        combine = axis.reduce_scatter if scatter else axis.all_reduce
        return combine(rows, parameter=weight)

    @staticmethod
    def backward(ctx, d_rows):
        if not ctx.weights.trains(ctx.weight):
            return None, None, None, None
        local, elsewhere = ctx.saved_tensors
        if ctx.scatter:
            d_rows = ctx.weights.context.grid.x.all_gather(d_rows, parameter=ctx.weight)
        # Each rank of x has the gradient of all rows and accumulates the gradients of its own rows. It does so in the
        # master dtype, because the row of a frequent token accumulates thousands of gradients.
        d_rows = cleared(d_rows, elsewhere, ctx.weight)
        ctx.weights.scatter(ctx.weight, lambda earlier: table_gradient(d_rows, local, ctx.rows, earlier))
        return None, None, None, None


class PositionsFunction(Function):
    """``x`` plus the rows of a table for the positions 0 … length-1 of each sequence."""

    @staticmethod
    def forward(ctx, x, weight, length: int):
        ctx.table, ctx.length = weight, length
        return add_positions(x, weight, length)

    @staticmethod
    def backward(ctx, d_out):
        return d_out, positions_gradient(d_out, ctx.table, ctx.length), None


class RowsAtFunction(Function):
    """``x`` plus the rows of a table at given positions."""

    @staticmethod
    def forward(ctx, x, weight, positions):
        ctx.save_for_backward(positions)
        ctx.table = weight
        return add_rows_at(x, weight, positions)

    @staticmethod
    def backward(ctx, d_out):
        return d_out, rows_at_gradient(d_out, ctx.table, *ctx.saved_tensors), None


class FactorFunction(Function):
    """``x`` times a factor that is rounded to its dtype."""

    @staticmethod
    def forward(ctx, x, factor: float):
        ctx.factor = factor
        return multiplied(x, factor)

    @staticmethod
    def backward(ctx, d_out):
        return multiplied(d_out, ctx.factor), None


@dataclass(frozen=True)
class TokenEmbeddingSpec(LayerSpec):
    """Token ids [batch, sequence] → [tokens, hidden over y] of this rank's tokens, in the compute dtype.

    Attributes:
        rows: size of the padded vocabulary. No token id refers to padding, and the loss ignores it.
        hidden: global number of features.
        used: size of the vocabulary without padding; None: there is no padding.
        std: standard deviation of the initial weight.
    """

    rows: int
    hidden: int
    used: int | None = None
    std: float = 0.02

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the table [vocabulary, hidden]: x and z split the stored vocabulary, y splits hidden."""
        unpadded, layout = None if self.used is None else (self.used, self.hidden), Layout(("x", "z"), ("y",))
        shape = (self.rows, self.hidden)
        return {"weight": ParameterSpec(shape, layout, unpadded, std=self.std, group="embeddings", streamed=True)}

    def forward(self, layer: BoundLayer, ids: Tensor, tokens: TokenIndex) -> Tensor:
        return LookupFunction.apply(layer.weight, tokens.gathered(ids), layer.weights, tokens.axis.size > 1)


@dataclass(frozen=True)
class PositionEmbeddingSpec(LayerSpec):
    """Adds learned vectors of positions to [tokens, hidden over y], in the compute dtype.

    The positions are 0 … length-1. With documents they restart at 0 in every document.
    """

    positions: int
    hidden: int
    std: float = 0.02

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the table [positions, hidden], hidden over y."""
        layout = Layout((), ("y",))
        shape = (self.positions, self.hidden)
        return {"weight": ParameterSpec(shape, layout, std=self.std, group="embeddings", summed=BETWEEN_LAYERS)}

    def forward(self, layer: BoundLayer, x: Tensor, tokens: TokenIndex) -> Tensor:
        if tokens.documents is not None or tokens.cache is not None or tokens.axis.size > 1 or tokens.context:
            return RowsAtFunction.apply(x, layer.weight, tokens.local(tokens.positions))
        return PositionsFunction.apply(x, layer.weight, tokens.length)


@dataclass(frozen=True)
class EmbeddingFactorSpec(LayerSpec):
    """Multiplies embeddings [tokens, hidden over y] by a factor, which is rounded to the compute dtype."""

    factor: float

    def forward(self, layer: BoundLayer, x: Tensor, tokens: TokenIndex) -> Tensor:
        return FactorFunction.apply(x, self.factor)


UNSHARDED = Axes(None, None)
_MAX_PERIOD = 10000.0


@kernel(lambda timesteps, channels: timesteps.like((*timesteps.shape, channels), wide_dtype(timesteps)))
def sinusoids(timesteps, channels: int):
    """Return cosines and then sines of timesteps [B] at frequencies from 1 down to 1/10000, float32 [B, channels].

    The result is float64 for float64 timesteps. ``channels`` is even.
    """
    dtype = timesteps.dtype if timesteps.dtype == torch.float64 else torch.float32
    exponents = torch.arange(channels // 2, dtype=dtype, device=timesteps.device) / (channels // 2)
    angles = timesteps[:, None].to(dtype) * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)


@dataclass(frozen=True)
class TimeEmbeddingSpec(LayerSpec):
    """Timesteps [B] → [B, hidden], replicated over x and y.

    Attributes:
        channels: number of sinusoids of a timestep.
        hidden: number of features of the embedding.
        std: standard deviation of the initial weights.
    """

    channels: int
    hidden: int
    std: float = 0.02

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "up": LinearSpec(self.channels, self.hidden, axes=UNSHARDED, std=self.std),
            "down": LinearSpec(self.hidden, self.hidden, axes=UNSHARDED, std=self.std),
        }

    async def forward(self, layer: BoundLayer, timesteps: Tensor) -> Tensor:
        x = cast_to(sinusoids(timesteps, self.channels), layer.context.compute_dtype)
        return await layer.down(silu(await layer.up(x)))


@dataclass(frozen=True)
class ScaleShiftSpec(LayerSpec):
    """Scale and shift [B, channels over ``axis``] of an activation, both linear in the embedding.

    Attributes:
        hidden: number of features of the embedding.
        channels: global number of channels.
        axis: splits the channels.
        std: standard deviation of the initial weight.
    """

    hidden: int
    channels: int
    axis: str
    std: float = 0.02

    def layers(self) -> dict[str, LayerSpec]:
        axes = Axes(None, self.axis)
        return {"linear": LinearSpec(self.hidden, self.channels, axes=axes, num_fused=2, std=self.std)}

    async def forward(self, layer: BoundLayer, embedding: Tensor) -> tuple[Tensor, ...]:
        return (await layer.linear(silu(embedding))).unbind(1)
