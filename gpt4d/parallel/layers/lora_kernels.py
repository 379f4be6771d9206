"""The kernels of low-rank adapters."""

import torch


def spread(b, scale: float, sizes: tuple[int, ...]):
    """Return ``scale·b`` with a block of rows for each adapter, zero in columns of other adapters."""
    if len(sizes) == 1:
        return b * scale
    rank, pattern = b.shape[0], sum(sizes)
    columns = (b * scale).reshape(rank, -1, pattern).split(sizes, -1)
    result = b.new_zeros(len(sizes), rank, columns[0].shape[1], pattern)
    for index, (rows, part) in enumerate(zip(result, columns, strict=True)):
        start = sum(sizes[:index])
        rows[..., start : start + sizes[index]] = part
    return result.view(-1, *b.shape[1:])


def collected(d_spread, b, scale: float, sizes: tuple[int, ...]):
    """Return the gradient of ``b`` from the gradient of its spread rows."""
    if len(sizes) == 1:
        return (d_spread * scale).to(b.dtype)
    blocks = d_spread.view(len(sizes), b.shape[0], -1, sum(sizes))
    parts = [block.split(sizes, -1)[index] for index, block in enumerate(blocks)]
    return (torch.cat(parts, -1) * scale).to(b.dtype).view(b.shape)


def add_(out, part):
    """Add ``part`` to ``out`` in place."""
    return out.add_(part)
