"""The samples, documents and positions of a microbatch's tokens, their split between the layers, and cached keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt4d.parallel.comm.pending import MeshAxis
from gpt4d.parallel.kernels import Tensor, kernel
from gpt4d.parallel.layers.layer import BoundLayer
from gpt4d.parallel.lazy import F, torch


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
class Documents:
    """The documents of some sequences. A document that continues in the next sequence counts once in each sequence.

    Attributes:
        indices: [sequences, length], int64: number of documents that end before each token of the sequence; -1 for
            padding after the last document, which is a document for attention.
        counts: number of documents in each sequence, on the host, so that reading them does not wait for a GPU.
        padded: whether a sequence has padding.
    """

    indices: torch.Tensor
    counts: Sequence[int]
    padded: bool = False

    @classmethod
    def of_indices(cls, indices: torch.Tensor, on_host: torch.Tensor) -> Documents:
        """Return documents from their ``indices``, which ``on_host`` also has, in host memory."""
        padding = on_host[:, -1] < 0
        return cls(indices, (on_host.amax(1) + 1 + padding).tolist(), bool(padding.any()))

    @classmethod
    def ending_with(cls, token: int, ids: torch.Tensor, on_host: torch.Tensor | None = None) -> Documents:
        """Return the documents in the sequences ``ids`` [sequences, length]. Each document ends with ``token``.

        ``on_host``: the same ids in host memory, if available, to avoid waiting for a GPU.
        """
        ends = (ids == token).long()
        # No document begins after the last token.
        counts = 1 + ((ids if on_host is None else on_host)[:, :-1] == token).sum(1)
        return cls(ends.cumsum(1) - ends, counts.tolist())

    def chunk(self, count: int) -> list[Documents]:
        """Split the sequences into ``count`` equal chunks and return the documents of each chunk."""
        size = len(self.counts) // count
        counts = [self.counts[index * size : (index + 1) * size] for index in range(count)]
        return [Documents(*each, self.padded) for each in zip(self.indices.split(size), counts, strict=True)]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[sequences, length]: position of each token in its document."""
        places = torch.arange(self.indices.shape[1], device=self.indices.device)
        return places - torch.where(self._begins, places, 0).cummax(1).values

    @cached_property
    def mask(self) -> torch.Tensor:
        """[sequences, 1, query, key], boolean: True for keys of the query's document at or before the query."""
        return (self.indices[:, None, :, None] == self.indices[:, None, None, :]).tril_()

    @cached_property
    def starts(self) -> torch.Tensor:
        """[documents + 1 or more], int32: offset of each document in the flattened sequences, and the total length.

        The total length repeats until the number of elements is a power of two. So microbatches have few shapes,
        because a library of a GPU may prepare kernels for each. Empty documents take no time.
        """
        document_numbers = self._begins.flatten().cumsum(0)  # each token's document, counted from 1
        numbers = torch.arange(1, 1 + (1 << sum(self.counts).bit_length()), device=document_numbers.device)
        return torch.searchsorted(document_numbers, numbers, out_int32=True)

    @cached_property
    def _begins(self) -> torch.Tensor:
        return F.pad(self.indices[:, 1:] != self.indices[:, :-1], (1, 0), value=True)


@dataclass(eq=False)
class KeyValueCache:
    """The keys and values of each attention layer on this rank, and the positions of the current forward's tokens.

    Keys are stored at the indices of their tokens. Keys of padding after a text are overwritten when the text reaches
    them, and no earlier token attends to them. ``begin`` describes the tokens of a forward.

    In the forward of a prompt, the ranks of ``parallel.context`` may have segments of each text. They gather the keys
    and values, and each rank stores them all.

    Attributes:
        capacity: maximum number of tokens of a text.
        places: [texts, tokens]: index of each token in its text.
        key_places: [texts, tokens of all ranks that share a text]: index of each new key in its text.
        positions: [texts, tokens]: position of each token in its document.
        mask: [texts, 1, tokens, capacity]: True for the indices that each token attends to.
    """

    capacity: int
    places: torch.Tensor = field(init=False)
    key_places: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    mask: torch.Tensor = field(init=False)
    _cached: dict[BoundLayer, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether this rank computes all new tokens of its texts."""
        return self.places.shape == self.key_places.shape

    def begin(
        self,
        places: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None = None,
        key_places: torch.Tensor | None = None,
    ) -> None:
        """Begin a forward.

        Args:
            places: index of each token in its text, [texts, tokens].
            positions: position of each token in its document, [texts, tokens].
            documents: the documents of the texts, [texts, capacity]; None if each text is one document.
            key_places: as for the attribute; None if this rank has complete texts.
        """
        self.places, self.positions = places, positions
        self.key_places = places if key_places is None else key_places
        keys = torch.arange(self.capacity, device=places.device)
        mask = keys <= places[..., None]
        if documents is not None:
            mask &= documents.indices.gather(1, places)[..., None] == documents.indices[:, None]
        self.mask = mask[:, None]

    def extend(self, layer: BoundLayer, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [texts, tokens, heads, size] and return the cached, [texts, capacity, heads, size]."""
        if layer not in self._cached:
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self._cached[layer] = k.new_zeros(shape), v.new_zeros(shape)
        texts = torch.arange(len(k), device=k.device)[:, None]
        for cached, new in zip(self._cached[layer], (k, v), strict=True):
            cached[texts, self.key_places] = new
        return self._cached[layer]


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

    sample_ids: Tensor
    length: int
    axis: MeshAxis
    documents: Documents | None = None
    num_chunks: int = 1
    cache: KeyValueCache | None = None
    context: MeshAxis | None = None
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

    def local(self, values: Tensor) -> Tensor:
        """Return this rank's slice of each chunk of values [sequences, length], as [tokens]."""
        return local_part(values, self.num_chunks, self.axis.size, self.axis.index)

    def gathered(self, values: Tensor) -> Tensor:
        """Return values [sequences, length] of all tokens in the order of an all-gather's result, [tokens]."""
        return in_gathered_order(values, self.num_chunks, self.axis.size)

    def restored(self, values: Tensor) -> Tensor:
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
    def samples(self) -> Tensor:
        """[this rank's tokens]: index of each token's sequence in the run."""
        return self.local(samples_of(self.sample_ids, self.length))

    @cached_property
    def places(self) -> Tensor:
        """[this rank's tokens]: index of each token in its sequence."""
        return self.local(self.indices)

    @cached_property
    def unpadded(self) -> Tensor | None:
        """[this rank's tokens], boolean: the tokens that are no padding; None without padding."""
        if self.documents is None or not self.documents.padded:
            return None
        unpadded, context = self.documents.indices >= 0, self.context
        return self.local(unpadded if context is None else own_segments(unpadded, context.size, context.index))

    @property
    def indices(self) -> Tensor:
        """[sequences, length]: index of each token in its sequence."""
        if self.context is None:
            return places_of(self.sample_ids, self.length)
        return places_in_segments(self.sample_ids, self.length, self.context.size, self.context.index)


def tokens_of(
    layer: BoundLayer,
    sample_ids: Tensor,
    length: int,
    documents: Documents | None = None,
    cache: KeyValueCache | None = None,
    complete: bool = True,
) -> TokenIndex:
    """Return the tokens of a microbatch.

    Args:
        layer: the model, whose pass decides about chunks and about the split of the tokens.
        sample_ids: as for ``TokenIndex``, as are ``length``, ``documents`` and ``cache``.
        length: number of tokens per sequence on this rank.
        documents: the documents of complete sequences.
        cache: keys and values of preceding tokens.
        complete: this rank has complete sequences; if false, ``parallel.context`` ranks have segments of them.
    """
    grid, current = layer.context.grid, layer.current_pass
    shared = None if complete or grid.context.size == 1 else grid.context
    axis = grid.axis("x" if current.splits_tokens else None)
    return TokenIndex(sample_ids, length, axis, documents, current.num_chunks, cache, shared)
