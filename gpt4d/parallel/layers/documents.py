"""Documents packed into sequences of tokens. Attention and positions do not cross a document's boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


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
    def of_indices(cls, indices: torch.Tensor, on_host: torch.Tensor) -> "Documents":
        """Return documents from their ``indices``, which ``on_host`` also has, in host memory."""
        padding = on_host[:, -1] < 0
        return cls(indices, (on_host.amax(1) + 1 + padding).tolist(), bool(padding.any()))

    @classmethod
    def ending_with(cls, token: int, ids: torch.Tensor, on_host: torch.Tensor | None = None) -> "Documents":
        """Return the documents in the sequences ``ids`` [sequences, length]. Each document ends with ``token``.

        ``on_host``: the same ids in host memory, if available, to avoid waiting for a GPU.
        """
        ends = (ids == token).long()
        # No document begins after the last token.
        counts = 1 + ((ids if on_host is None else on_host)[:, :-1] == token).sum(1)
        return cls(ends.cumsum(1) - ends, counts.tolist())

    def chunk(self, count: int) -> list["Documents"]:
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
