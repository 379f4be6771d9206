"""The kernels of token order and token positions."""

import torch


def local_part(values, chunks: int, ranks: int, index: int):
    """Return the values of rank ``index`` as one dim, chunk by chunk."""
    return _parts(values, chunks, ranks)[:, index].flatten()


def in_gathered_order(values, chunks: int, ranks: int):
    """Return all values as one dim, rank by rank and then chunk by chunk."""
    return _parts(values, chunks, ranks).transpose(0, 1).flatten()


def _parts(values: torch.Tensor, chunks: int, ranks: int) -> torch.Tensor:
    return values.reshape(chunks, ranks, -1)


def places_of(sample_ids, length: int):
    """Return 0 … length-1 for each sequence, [sequences, length]."""
    return torch.arange(length, device=sample_ids.device).expand(len(sample_ids), -1)


def samples_of(sample_ids, length: int):
    """Expand ``sample_ids`` [sequences] to [sequences, length]."""
    return sample_ids[:, None].expand(-1, length)
