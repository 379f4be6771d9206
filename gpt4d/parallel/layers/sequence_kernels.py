"""The kernels of the order and the places of tokens."""

import torch


def local_part(values, chunks: int, ranks: int, index: int):
    return _parts(values, chunks, ranks)[:, index].flatten()


def in_gathered_order(values, chunks: int, ranks: int):
    return _parts(values, chunks, ranks).transpose(0, 1).flatten()


def _parts(values: torch.Tensor, chunks: int, ranks: int) -> torch.Tensor:
    return values.reshape(chunks, ranks, -1)


def places_of(sample_ids, length: int):
    return torch.arange(length, device=sample_ids.device).expand(len(sample_ids), -1)


def samples_of(sample_ids, length: int):
    return sample_ids[:, None].expand(-1, length)
