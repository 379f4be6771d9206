"""The kernels of token order and token positions."""

import torch

from gpt4d.parallel.layers.sequence import segments_of


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


def own_segments(values, ranks: int, index: int):
    """Return the segments of a rank, concatenated."""
    parts = values.chunk(2 * ranks, 1)
    return torch.cat([parts[segment] for segment in segments_of(ranks, index)], 1)


def places_in_segments(sample_ids, length: int, ranks: int, index: int):
    """Return the indices of the tokens of a rank's segments, [sequences, length]."""
    return own_segments(torch.arange(length * ranks, device=sample_ids.device)[None], ranks, index).expand(
        len(sample_ids), -1
    )


def samples_of(sample_ids, length: int):
    """Expand ``sample_ids`` [sequences] to [sequences, length]."""
    return sample_ids[:, None].expand(-1, length)
