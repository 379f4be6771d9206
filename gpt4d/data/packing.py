"""Complete conversations packed into sequences. The packing depends on the token files and the length alone."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpt4d.data.batch import Counts
from gpt4d.data.sampler import Order
from gpt4d.data.tokens import TokenFiles

IGNORED = -1  # target of a token without a loss


class Packing(NamedTuple):
    """Documents by sequence.

    Attributes:
        documents: numbers of the documents, sequence after sequence. Documents that exceed a sequence are left out.
        bounds: [sequences + 1]: sequence i has ``documents[bounds[i] : bounds[i + 1]]``.
    """

    documents: np.ndarray
    bounds: np.ndarray


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Assign documents to sequences of at most ``capacity`` tokens by best fit, the longest documents first.

    Sequences and their documents stay in the order of the files: a sequence is placed by its first document.
    """
    packed = np.flatnonzero(lengths <= capacity)
    order = packed[np.argsort(-lengths[packed], kind="stable")]
    sequence_of = np.empty(len(lengths), np.int64)
    by_space = defaultdict[int, list[int]](list)  # sequences by the number of tokens that they can still take
    spaces = 0  # a bit for each key of ``by_space`` that has sequences
    count = 0
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            sequence = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, sequence, count = capacity, count, count + 1
        sequence_of[document] = sequence
        by_space[space - length].append(sequence)
        spaces |= 1 << space - length
    firsts = np.full(count, len(lengths))
    np.minimum.at(firsts, sequence_of[packed], packed)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(firsts)] = np.arange(count)
    sequences = ranks[sequence_of[packed]]
    documents = packed[np.argsort(sequences, kind="stable")]
    return Packing(documents, np.concatenate([[0], np.bincount(sequences, minlength=count).cumsum()]))


class PackedSequences:
    """Conversations of a split, packed into sequences of ``length`` tokens (gpt4d.data.loader.Source).

    A row is [3, length], int32: the tokens; the tokens to predict, or ``IGNORED``; and for each token the number of
    conversations that end before it in the sequence. End-of-text tokens fill a sequence after its last conversation,
    and have -1 as this number (gpt4d.parallel.layers.sequence).

    Args:
        files: token files of conversations.
        split: ``train`` or ``validation``.
        length: number of tokens that a sequence predicts.
        seed: seed of the order.
        shuffle: shuffle the sequences in each epoch.
        multiple: append empty sequences, which have no loss, until this number divides ``count``.
    """

    dtype = np.dtype(np.int32)

    def __init__(self, files: TokenFiles, split: str, length: int, seed: int, shuffle: bool, multiple: int = 1):
        self.tokens, self.mask, self.end = files.tokens(split), files.mask(split), files.end_of_text
        self.row_shape: tuple[int, ...] = (3, length)
        self.capacity = length + 1  # a last token is only predicted
        self.ends = files.document_ends(split)
        self.starts = np.concatenate([[0], self.ends[:-1]]) if len(self.ends) else self.ends
        lengths = self.ends - self.starts
        self.documents, bounds = pack(lengths, self.capacity)
        self.long = np.flatnonzero(lengths > self.capacity)  # conversations that are left out
        self.filled = int(lengths[self.documents].sum())  # tokens in all sequences
        self.packed = len(bounds) - 1
        self.count = -(-self.packed // multiple) * multiple
        self.bounds = np.pad(bounds, (0, self.count - self.packed), mode="edge")
        parts = [np.add.reduceat(part, starts, dtype=np.int64) for part, starts in self._parts()]
        trained = np.concatenate([np.empty(0, np.int64), *parts])
        sequences = np.repeat(np.arange(self.count), np.diff(self.bounds))
        self._counts = np.zeros((self.count, 2), np.int64)  # tokens of each sequence: with a loss, and without padding
        np.add.at(self._counts, sequences, np.stack((trained, lengths), 1)[self.documents])
        self._counts[:, 1] = self._counts[:, 1].clip(max=length)
        self.order = Order(self.count, seed, shuffle)

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the mask of each part of the files, and the starts of its conversations within the part."""
        cuts = np.searchsorted(self.starts, [0, *self.mask.ends])
        for number, part in enumerate(self.mask.parts):
            starts = self.starts[cuts[number] : cuts[number + 1]]
            yield part, starts - starts[0]

    def counts(self, sample_ids: np.ndarray) -> Counts:
        """Return the numbers of tokens of the samples."""
        return Counts(*self._counts[self.order.positions(sample_ids)].sum(0).tolist())

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, 3, length]."""
        rows = np.empty((len(sample_ids), *self.row_shape), self.dtype)
        for row, position in zip(rows, self.order.positions(sample_ids).tolist(), strict=True):
            self._fill(row, self.documents[self.bounds[position] : self.bounds[position + 1]].tolist())
        return rows

    def _fill(self, row: np.ndarray, documents: list[int]) -> None:
        ids, mask = np.full(self.capacity, self.end, self.dtype), np.zeros(self.capacity, bool)
        place = 0
        row[2] = -1
        for number, document in enumerate(documents):
            start, stop = int(self.starts[document]), int(self.ends[document])
            after = place + stop - start
            ids[place:after], mask[place:after] = self.tokens.document(start, stop), self.mask[start:stop]
            row[2, place:after] = number
            place = after
        row[0], row[1] = ids[:-1], np.where(mask[1:], ids[1:], IGNORED)
