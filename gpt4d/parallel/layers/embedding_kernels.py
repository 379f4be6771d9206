"""The kernels of token, position and time embeddings."""

import math

import torch
import torch.nn.functional as F


def look_up(table, ids, first: int):
    local = ids - first
    elsewhere = (local < 0) | (local >= len(table))
    local = local.masked_fill_(elsewhere, 0)
    return F.embedding(local, table), local, elsewhere


def clear_(rows, elsewhere):
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


def cleared(d_rows, elsewhere, weight):
    return d_rows.to(weight.dtype).masked_fill(elsewhere.unsqueeze(-1), 0)


def table_gradient(d_rows, local, count: int, added_to):
    table = d_rows.new_zeros(count, d_rows.shape[-1]) if added_to is None else added_to
    return table.index_add_(0, local.flatten(), d_rows.flatten(0, -2))


def add_positions(x, weight, length: int):
    rows = weight[:length].to(x.dtype).expand(len(x) // length, -1, -1)
    return (x.unflatten(0, (-1, length)) + rows).flatten(0, 1)


def positions_gradient(d_out, weight, length: int):
    d_rows = d_out.unflatten(0, (-1, length)).sum(0, dtype=weight.dtype)
    return F.pad(d_rows, (0, 0, 0, weight.shape[0] - length))


def add_rows_at(x, weight, positions):
    return x + F.embedding(positions, weight).to(x.dtype)


def rows_at_gradient(d_out, weight, positions):
    return torch.ops.aten.embedding_dense_backward(d_out.to(weight.dtype), positions, weight.shape[0], -1, False)


def multiplied(x, factor: float):
    return x * torch.tensor(factor, dtype=x.dtype)


_MAX_PERIOD = 10000.0


def sinusoids(timesteps, channels: int):
    dtype = timesteps.dtype if timesteps.dtype == torch.float64 else torch.float32
    exponents = torch.arange(channels // 2, dtype=dtype, device=timesteps.device) / (channels // 2)
    angles = timesteps[:, None].to(dtype) * torch.exp(-math.log(_MAX_PERIOD) * exponents)
    return torch.cat((angles.cos(), angles.sin()), -1)


def scaled_and_shifted(x, scale, shift):
    return torch.addcmul(shift[:, None, None], x, (1 + scale)[:, None, None])
