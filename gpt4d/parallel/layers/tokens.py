"""Where the tokens of a microbatch come from, and which of them a rank has between the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.key_value_cache import KeyValueCache
from gpt4d.parallel.weights import WeightStream


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some sequences, one after another. Between the layers ``axis`` may split those of each chunk.

    Attributes:
        sample_ids: [sequences], int64: index of each sequence in the whole run, which dropout depends on.
        length: tokens of a sequence.
        documents: attention and positions stay inside one. None: no limits.
        axis: splits the tokens of each chunk between the layers.
        num_chunks: chunks that the sequences are in.
        cache: of the keys and values of the tokens before these, which continue texts; None in training.
    """

    sample_ids: torch.Tensor
    length: int
    documents: Documents | None = None
    axis: Axis = field(default_factory=lambda: Axis("x"))
    num_chunks: int = 1
    cache: KeyValueCache | None = None

    def chunk(self, count: int) -> Sequence["Tokens"]:
        """Return the tokens of each chunk."""
        assert count == self.num_chunks, f"these are {self.num_chunks} chunk(s), not {count}"
        documents = [None] * count if self.documents is None else self.documents.chunk(count)
        samples = self.sample_ids.chunk(count)
        return [
            replace(self, sample_ids=ids, documents=part, num_chunks=1)
            for ids, part in zip(samples, documents, strict=True)
        ]

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [sequences, length] of this rank's tokens, [tokens]: its part of each chunk."""
        return self._parts(values)[:, self.axis.index].flatten()

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [sequences, length] of all tokens in the order in which an all-gather has them, [tokens]."""
        return self._parts(values).transpose(0, 1).flatten()

    def restored(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [tokens, …] in the order of ``gathered`` as [sequences, length, …]."""
        parts = values.unflatten(0, (self.axis.size, self.num_chunks, -1)).transpose(0, 1)
        return parts.flatten(0, 2).unflatten(0, (-1, self.length))

    def _parts(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(self.num_chunks, self.axis.size, -1)

    @property
    def positions(self) -> torch.Tensor:
        """[sequences, length]: place of each token in its document."""
        if self.cache is not None:
            return self.cache.positions
        if self.documents is None:
            return self._places
        return self.documents.positions

    @property
    def _places(self) -> torch.Tensor:
        return torch.arange(self.length, device=self.sample_ids.device).expand(len(self.sample_ids), -1)

    @cached_property
    def samples(self) -> torch.Tensor:
        """[tokens of this rank]: index of each token's sequence in the run."""
        return self.local(self.sample_ids[:, None].expand(-1, self.length))

    @cached_property
    def places(self) -> torch.Tensor:
        """[tokens of this rank]: place of each token in its sequence."""
        return self.local(self._places)


def tokens_of(
    weights: WeightStream,
    sample_ids: torch.Tensor,
    length: int,
    documents: Documents | None = None,
    cache: KeyValueCache | None = None,
) -> Tokens:
    """Return the tokens of a microbatch of the stage that has ``weights``."""
    axis = weights.grid.x if weights.splits_tokens else Axis("x")
    return Tokens(sample_ids, length, documents, axis, weights.num_chunks, cache)
