"""The samples and positions of a microbatch's tokens, and the split of tokens between the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpt4d.parallel.kernels import kernel
from gpt4d.parallel.lazy import torch

if TYPE_CHECKING:
    from gpt4d.parallel.layers.documents import Documents
    from gpt4d.parallel.layers.key_value_cache import KeyValueCache


@kernel(lambda values, chunks, ranks, *_: values.like((math.prod(values.shape) // ranks,)))
def local_part(values, chunks: int, ranks: int, index: int):
    """Return slice ``index`` of each chunk of values [sequences, length], as one dim."""
    return _parts(values, chunks, ranks)[:, index].flatten()


@kernel(lambda values, *_: values.like((math.prod(values.shape),)))
def in_gathered_order(values, chunks: int, ranks: int):
    """Return values [sequences, length] as one dim, rank by rank: each rank's slices of all chunks."""
    return _parts(values, chunks, ranks).transpose(0, 1).flatten()


def _parts(values: torch.Tensor, chunks: int, ranks: int) -> torch.Tensor:
    return values.reshape(chunks, ranks, -1)


@kernel(lambda sample_ids, length: sample_ids.like((*sample_ids.shape, length)), free=True)
def places_of(sample_ids, length: int):
    """Return the index of each token in its sequence, [sequences, length]. All sequences share the memory."""
    return torch.arange(length, device=sample_ids.device).expand(len(sample_ids), -1)


@kernel(lambda values, ranks, *_: values.like((values.shape[0], values.shape[1] // ranks, *values.shape[2:])))
def own_segments(values, ranks: int, index: int):
    """Return the segments of rank ``index`` (``segments_of``) of values [sequences, length, …]."""
    parts = values.chunk(2 * ranks, 1)
    return torch.cat([parts[segment] for segment in segments_of(ranks, index)], 1)


@kernel(lambda sample_ids, length, *_: sample_ids.like((*sample_ids.shape, length)), free=True)
def places_in_segments(sample_ids, length: int, ranks: int, index: int):
    """Return the index of each token of rank ``index`` in its sequence, [sequences, length]. Sequences share memory."""
    return own_segments.in_torch(torch.arange(length * ranks, device=sample_ids.device)[None], ranks, index).expand(
        len(sample_ids), -1
    )


def segments_of(ranks: int, index: int) -> tuple[int, int]:
    """Return the segments of a rank. ``ranks`` ranks split a sequence into twice as many segments.

    With causal attention, a segment attends to itself and to the segments before it. So all ranks have equal work.
    """
    return index, 2 * ranks - 1 - index


@kernel(lambda sample_ids, length: sample_ids.like((*sample_ids.shape, length)), free=True)
def samples_of(sample_ids, length: int):
    """Return the sample id of each token, [sequences, length], as a view of ``sample_ids``."""
    return sample_ids[:, None].expand(-1, length)


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """The concatenated tokens of some sequences. Between the layers, ``axis`` may split the tokens of each chunk.

    Attributes:
        sample_ids: [sequences], int64: index of each sequence in the run, which dropout depends on.
        length: number of tokens per sequence on this rank.
        axis: splits the tokens of each chunk between the layers; ``grid.axis(None)`` if every rank has all tokens.
        documents: limit attention and positions; None: each sequence is one document.
        num_chunks: number of chunks of the microbatch.
        cache: keys and values of preceding tokens in generation; None in training.
        context: the axis whose ranks have segments of the same sequences (``parallel.context``); None: every rank has
            complete sequences.
        attention_calls: calls of gpt4d.parallel.layers.context_attention whose backward has not begun, in their order.
    """

    sample_ids: Any
    length: int
    axis: Any
    documents: Documents | None = None
    num_chunks: int = 1
    cache: KeyValueCache | None = None
    context: Any = None
    attention_calls: list[Any] = field(default_factory=list, init=False)

    def chunk(self, count: int) -> Sequence[TokenIndex]:
        """Split the sequences into ``count`` chunks and return the tokens of each chunk."""
        assert count == self.num_chunks, f"the tokens have {self.num_chunks} chunk(s), not {count}"
        documents = [None] * count if self.documents is None else self.documents.chunk(count)
        samples = self.sample_ids.chunk(count)
        return [
            replace(self, sample_ids=ids, documents=part, num_chunks=1)
            for ids, part in zip(samples, documents, strict=True)
        ]

    def local(self, values: Any) -> Any:
        """Return this rank's slice of each chunk of values [sequences, length], as [tokens]."""
        return local_part(values, self.num_chunks, self.axis.size, self.axis.index)

    def gathered(self, values: Any) -> Any:
        """Return values [sequences, length] of all tokens in the order of an all-gather's result, [tokens]."""
        return in_gathered_order(values, self.num_chunks, self.axis.size)

    def restored(self, values: Any) -> Any:
        """Return values [tokens, …] in the order of ``gathered`` as [sequences, length, …]."""
        parts = values.unflatten(0, (self.axis.size, self.num_chunks, -1)).transpose(0, 1)
        return parts.flatten(0, 2).unflatten(0, (-1, self.length))

    @property
    def positions(self) -> Any:
        """[sequences, length]: position of each token in its document."""
        if self.cache is not None:
            return self.cache.positions
        if self.documents is None:
            return self.indices
        positions, context = self.documents.positions, self.context
        return positions if context is None else own_segments(positions, context.size, context.index)

    @cached_property
    def samples(self) -> Any:
        """[this rank's tokens]: index of each token's sequence in the run."""
        return self.local(samples_of(self.sample_ids, self.length))

    @cached_property
    def places(self) -> Any:
        """[this rank's tokens]: index of each token in its sequence."""
        return self.local(self.indices)

    @cached_property
    def unpadded(self) -> Any:
        """[this rank's tokens], boolean: the tokens that are no padding; None without padding."""
        if self.documents is None or not self.documents.padded:
            return None
        unpadded, context = self.documents.indices >= 0, self.context
        return self.local(unpadded if context is None else own_segments(unpadded, context.size, context.index))

    @property
    def indices(self) -> Any:
        """[sequences, length]: index of each token in its sequence."""
        if self.context is None:
            return places_of(self.sample_ids, self.length)
        return places_in_segments(self.sample_ids, self.length, self.context.size, self.context.index)


def tokens_of(
    weights: Any,
    sample_ids: Any,
    length: int,
    documents: Documents | None = None,
    cache: KeyValueCache | None = None,
    complete: bool = True,
) -> TokenIndex:
    """Return the tokens of a microbatch.

    Args:
        weights: the weights of the stage.
        sample_ids: as for ``TokenIndex``, as are ``length``, ``documents`` and ``cache``.
        length: number of tokens per sequence on this rank.
        documents: the documents of complete sequences.
        cache: keys and values of preceding tokens.
        complete: this rank has complete sequences; if false, ``parallel.context`` ranks have segments of them.
    """
    grid = weights.context.grid
    axis, context = grid.axis("x" if weights.splits_tokens else None), grid.context
    shared = None if complete or context.size == 1 else context
    return TokenIndex(sample_ids, length, axis, documents, weights.num_chunks, cache, shared)
