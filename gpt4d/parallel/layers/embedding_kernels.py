"""The kernels of token, position and time embeddings."""

import math

import torch
import torch.nn.functional as F


def look_up(table, ids, first: int):
    """Return rows of ``table``, their local indices, and a mask of ids that other ranks store."""
    local = ids - first
    elsewhere = (local < 0) | (local >= len(table))
    local = local.masked_fill_(elsewhere, 0)
    return F.embedding(local, table), local, elsewhere


def clear_(rows, elsewhere):
    """Set the rows whose ids other ranks store to zero in place."""
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


def cleared(d_rows, elsewhere, weight):
    """Return ``d_rows`` in the dtype of ``weight``, with zeros for ids that other ranks store."""
    return d_rows.to(weight.dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


def table_gradient(d_rows, local, count: int, added_to):
    """Accumulate the gradients of rows into a table [count, hidden]."""
    table = d_rows.new_zeros(count, d_rows.shape[-1]) if added_to is None else added_to
    return table.index_add_(0, local.flatten(), d_rows.flatten(0, -2))


def add_positions(x, weight, length: int):
    """Add the first ``length`` rows of ``weight`` to each sequence of ``x`` [tokens, hidden]."""
    rows = weight[:length].to(x.dtype).expand(len(x) // length, -1, -1)
    return (x.unflatten(0, (-1, length)) + rows).flatten(0, 1)


def positions_gradient(d_out, weight, length: int):
    """Return the gradient of ``weight`` [positions, hidden], with zeros from row ``length`` on."""
    d_rows = d_out.unflatten(0, (-1, length)).sum(0, dtype=weight.dtype)
    return F.pad(d_rows, (0, 0, 0, weight.shape[0] - length))


def add_rows_at(x, weight, positions):
    """Add the rows of ``weight`` at ``positions`` [tokens] to ``x`` [tokens, hidden]."""
    return x + F.embedding(positions, weight).to(x.dtype)


def rows_at_gradient(d_out, weight, positions):
    """Return the gradient of ``weight``, accumulated in its dtype."""
    return torch.ops.aten.embedding_dense_backward(d_out.to(weight.dtype), positions, weight.shape[0], -1, False)


def multiplied(x, factor: float):
    """Return ``x`` times ``factor``, which is rounded to the dtype of ``x`` first."""
    return x * torch.tensor(factor, dtype=x.dtype)


_MAX_PERIOD = 10000.0


def sinusoids(timesteps, channels: int):
    """Return cosines and then sines of ``timesteps`` [B], as [B, channels]."""
    dtype = timesteps.dtype if timesteps.dtype == torch.float64 else torch.float32
    exponents = torch.arange(channels // 2, dtype=dtype, device=timesteps.device) / (channels // 2)
    angles = timesteps[:, None].to(dtype) * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)
