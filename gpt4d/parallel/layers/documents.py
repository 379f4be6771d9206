"""Documents that share a sequence of tokens: attention and positions stay inside one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of some sequences. A document that continues in another sequence counts as one in each.

    Attributes:
        indices: [sequences, length], int64: how many documents end before each token of its sequence.
        counts: documents in each sequence, on the host, so that the host need not wait for a GPU.
    """

    indices: torch.Tensor
    counts: Sequence[int]

    @classmethod
    def ending_with(cls, token: int, ids: torch.Tensor, on_host: torch.Tensor | None = None) -> "Documents":
        """Return the documents of sequences of token ids, [sequences, length], that ``token`` ends.

        ``on_host``: the same ids, where the host need not wait for them.
        """
        ends = (ids == token).long()
        # A document that ends with the last token begins no other.
        counts = 1 + ((ids if on_host is None else on_host)[:, :-1] == token).sum(1)
        return cls(ends.cumsum(1) - ends, counts.tolist())

    def chunk(self, count: int) -> list["Documents"]:
        """Return the documents of each of ``count`` equal parts of the sequences."""
        size = len(self.counts) // count
        parts = enumerate(self.indices.split(size))
        return [Documents(indices, self.counts[index * size : (index + 1) * size]) for index, indices in parts]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[sequences, length]: place of each token in its document."""
        places = torch.arange(self.indices.shape[1], device=self.indices.device)
        return places - torch.where(self._begins, places, 0).cummax(1).values

    @cached_property
    def mask(self) -> torch.Tensor:
        """[sequences, 1, query, key], boolean: keys of the query's document, up to itself."""
        return (self.indices[:, None, :, None] == self.indices[:, None, None, :]).tril_()

    @cached_property
    def starts(self) -> torch.Tensor:
        """[documents + 1], int32: the first token of each document of all sequences in turn; last, how many tokens."""
        document_numbers = self._begins.flatten().cumsum(0)  # of each token, from 1
        numbers = torch.arange(1, sum(self.counts) + 2, device=document_numbers.device)
        return torch.searchsorted(document_numbers, numbers, out_int32=True)

    @cached_property
    def _begins(self) -> torch.Tensor:
        return F.pad(self.indices[:, 1:] != self.indices[:, :-1], (1, 0), value=True)
