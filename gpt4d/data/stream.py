"""Sequences of a corpus that is tokenized while a run trains, in the order of its documents."""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gpt4d.config import ConfigError, DataConfig, is_remote
from gpt4d.data import documents
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.data.documents import Document, is_held_out
from gpt4d.data.preparation import Encoding
from gpt4d.data.sampler import permute
from gpt4d.runtime.errors import RankError

BLOCK = 1024  # sequences that are tokenized, shuffled and cached together
_CACHED = 2  # blocks, since a batch can begin in one block and end in the next


class Position(NamedTuple):
    """A token of the training text, at which a sequence begins."""

    epoch: int = 0  # number of times that all files have been read before
    file: int = 0  # index of the file, or of the shard of a hub dataset
    document: int = 0  # index of the document in the file
    token: int = 0  # index of the token in the document


class Stream:
    """Sequences of ``length`` tokens, and their last targets, of documents that are tokenized when they are needed.

    An epoch has the sequences of prepared token files (gpt4d.data.sampler.Sequences) in the order of the files. With
    ``shuffle``, the sequences of each block are permuted. Any thread may call the methods.

    Args:
        readers: functions that yield the documents of each file (``documents.readers``).
        encoding: how documents are tokenized. Held-out documents are skipped.
        length: number of tokens that a sequence predicts.
        seed: seed of the order.
        shuffle: shuffle the sequences of a block.
    """

    count = BLOCK  # the number of sequences of an epoch is not known, and a span of the loader is at most a block

    def __init__(
        self,
        readers: Sequence[Callable[[], Iterator[Document]]],
        encoding: Encoding,
        length: int,
        seed: int,
        shuffle: bool,
    ):
        self._readers, self._encoding, self._length = readers, encoding, length
        self._encode = encoding.encoder()
        self._seed, self._shuffle = seed, shuffle
        self.dtype, self.row_shape = np.dtype(encoding.dtype), (length + 1,)
        self._lock = threading.Lock()
        self.seek(0, Position())

    def seek(self, sample: int, position: Position) -> None:
        """Continue with ``sample``, given the position of its block (``position``). Earlier blocks are not read."""
        self._starts = {sample // BLOCK: position}  # positions of the blocks that have been reached
        self._blocks: dict[int, np.ndarray] = {}
        self._next = -1  # block that ``_sequences`` yields next
        self._sequences: Iterator[tuple[np.ndarray, Position]] = iter(())

    def position(self, sample: int) -> Position:
        """Return the position of the first sequence of the block that contains ``sample``."""
        with self._lock:
            block = sample // BLOCK
            if block not in self._starts:
                self._block(block - 1)
            return self._starts[block]

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, length + 1].

        Raises RankError for a document that cannot be read, and for a corpus that is shorter than a sequence.
        """
        rows = np.empty((len(sample_ids), *self.row_shape), self.dtype)
        blocks, places = np.divmod(sample_ids, BLOCK)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            within = places[chosen]
            if self._shuffle:
                within = permute(within, BLOCK, self._seed, block)
            with self._lock:
                rows[chosen] = self._block(block)[within]
        return rows

    def _block(self, number: int) -> np.ndarray:
        """Return the sequences of a block, in the order of the files."""
        if number not in self._blocks:
            if not 0 <= self._next <= number:
                self._next = max(block for block in self._starts if block <= number)
                self._sequences = self._read(self._starts[self._next])
            while self._next <= number:
                try:
                    sequences, positions = zip(*itertools.islice(self._sequences, BLOCK), strict=True)
                except ConfigError as error:
                    self._next = -1
                    raise RankError(str(error), error.exit_code) from None
                self._blocks[self._next] = np.stack(sequences)
                self._next += 1
                self._starts[self._next] = positions[-1]
                while len(self._blocks) > _CACHED:
                    del self._blocks[next(iter(self._blocks))]
        return self._blocks[number]

    def _read(self, start: Position) -> Iterator[tuple[np.ndarray, Position]]:
        """Yield all sequences from ``start`` on, each with the position of the next one. The tail of an epoch is lost.

        Raises ConfigError for a document that cannot be read, and for an epoch without a sequence.
        """
        while True:
            tail: deque[tuple[Position, np.ndarray]] = deque()  # tokens of documents, and the position of the first one
            tokens, count = 0, 0
            for position, ids in self._documents(start):
                tail.append((position, ids))
                tokens += len(ids)
                while tokens > self._length:
                    yield self._cut(tail), tail[0][0]
                    tokens -= self._length
                    count += 1
            if not count and not any(start[1:]):
                raise ConfigError(
                    f"train.seq_len={self._length}: a sequence takes {self._length + 1} tokens, and the training text "
                    f"has {tokens}; use more text or lower it"
                )
            start = Position(start.epoch + 1)

    def _documents(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Yield the tokens of the training documents from ``start`` to the end of its epoch, and their positions."""
        for file in range(start.file, len(self._readers)):
            first = start.document if file == start.file else 0
            for number, document in enumerate(itertools.islice(self._readers[file](), first, None), first):
                if is_held_out(document.text, self._encoding.fraction):
                    continue
                position = Position(start.epoch, file, number)
                if position[1:3] == start[1:3]:
                    position = start
                yield position, self._encode(document).ids[position.token :]

    def _cut(self, tail: deque[tuple[Position, np.ndarray]]) -> np.ndarray:
        """Remove ``length`` tokens from the beginning of ``tail``, and return them and the token after them."""
        row, filled = np.empty(self.row_shape, self.dtype), 0
        while True:
            position, ids = tail[0]
            taken = min(len(ids), self._length - filled)
            row[filled : filled + taken] = ids[:taken]
            filled += taken
            if taken < len(ids):
                row[-1] = ids[taken]
                tail[0] = position._replace(token=position.token + taken), ids[taken:]
                return row
            tail.popleft()


def open_stream(config: DataConfig, files: Sequence[CorpusFile], encoding: Encoding, length: int, seed: int) -> Stream:
    """Return the stream of a corpus, whose ``files`` rank 0 has found. A hub dataset has none.

    Raises ConfigError if a local file is missing on this rank, or has another size.
    """
    for file in files:
        found = None if is_remote(file.location) else os.stat(file.location).st_size
        if found not in (None, file.size):
            raise ConfigError(f"{file}: {found:,} bytes here and {file.size:,} bytes on rank 0; use equal files")
    return Stream(documents.readers(config, files), encoding, length, seed, config.shuffle)
