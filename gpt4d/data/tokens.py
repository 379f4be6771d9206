"""Token files: a corpus as token ids, memory-mapped.

A directory contains the files of each part, ``train_00000.tokens`` and ``validation_00000.tokens`` (uint16 or uint32).
Each file has an index, such as ``train_00000.idx``, with the uint64 ends of its documents. Files of conversations have
a mask, such as ``train_00000.msk``: one byte per token, 1 if the token has a loss. The directory also contains
``tokenizer.json`` and, written last, ``header.json`` with counts, sizes and checksums.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import HEADER, ConfigError
from gpt4d.data import tokenizers
from gpt4d.data.directory import SPLITS
from gpt4d.runtime.errors import RankError
from gpt4d.runtime.files import FileEntry, NewFile, checksum, counts

FORMAT = 4
ALL = "all"  # a split that consists of the training split and, after it, the validation split


def file_name(split: str, part: int, suffix: str) -> str:
    """Return the name of a part's file, such as ``train_00003.tokens``."""
    return f"{split}_{part:05}.{suffix}"


def file_names(split: str, part: int, masked: bool) -> list[str]:
    """Return the names of a part's files: tokens, ends of documents and, if ``masked``, the loss mask."""
    return [file_name(split, part, suffix) for suffix in ("tokens", "idx", "msk")[: 3 if masked else 2]]


def splits(split: str) -> tuple[str, ...]:
    """Return the splits of the files that ``split``, which may be ``ALL``, consists of."""
    return SPLITS if split == ALL else (split,)


def dtype_for(vocabulary: int) -> str:
    """Return the dtype for token ids below ``vocabulary``."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


class PartWriter(ExitStack):
    """Writer of the files of one part, a context manager: on exit without an error, they are flushed to disk.

    ``counts`` has the number of tokens and documents of each split and, if ``masked``, of the tokens with a loss.
    """

    def __init__(self, directory: Path, number: int, masked: bool):
        super().__init__()
        self.counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
        self._files = {
            split: {name: self.enter_context(NewFile(directory / name)) for name in file_names(split, number, masked)}
            for split in SPLITS
        }

    def add(self, split: str, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append the token ids of a document, which must have the dtype of the files, and its mask, uint8."""
        count = self.counts[split]
        count["tokens"] += len(ids)
        count["documents"] += 1
        written = [ids, np.array([count["tokens"]], np.uint64)]
        if mask is not None:
            count["trained"] = count.get("trained", 0) + int(mask.sum())
            written.append(mask)
        for file, values in zip(self._files[split].values(), written, strict=True):
            file.write(values.data.cast("B"))

    def header(self) -> dict:
        """Return the part's entry in the header: counts, and sizes and checksums of its files."""
        files = {name: file for by_name in self._files.values() for name, file in by_name.items()}
        return {**self.counts, "files": {name: file.entry._asdict() for name, file in files.items()}}


def entries(directory: Path, parts: list[dict]) -> list[tuple[Path, FileEntry]]:
    """Return every file of ``parts`` with the size and checksum with which it was written."""
    return [(directory / name, FileEntry(**entry)) for part in parts for name, entry in part["files"].items()]


def check_parts(parts: Any, dtype: str, masked: bool) -> None:
    """Raise ValueError, KeyError or TypeError if a ``PartWriter`` cannot have made ``parts``, read from JSON."""
    for number, part in enumerate(parts):
        sizes: dict[str, int] = {}
        for split in SPLITS:
            counts(part[split].values())
            tokens, documents = part[split]["tokens"], part[split]["documents"]
            stored = tokens * np.dtype(dtype).itemsize, documents * 8, tokens
            sizes |= dict(zip(file_names(split, number, masked), stored, strict=False))
        files = {name: FileEntry(**entry) for name, entry in part["files"].items()}
        if {name: entry.bytes for name, entry in files.items()} != sizes:
            raise ValueError(f"the files of part {number} do not match its tokens and documents")
        if not all(isinstance(entry.xxh3_128, str) for entry in files.values()):
            raise TypeError(f"part {number} has a file without a checksum")


def check_sizes(files: Iterable[tuple[Path, FileEntry]]) -> None:
    """Raise ConfigError, naming the file, if one of ``files`` is missing or has another size than was written."""
    for path, entry in files:
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            problem = "missing" if size is None else f"{size:,} bytes long instead of {entry.bytes:,}"
            raise ConfigError(f"{path}: {problem}; prepare the tokens again")


def check_content(files: Iterable[tuple[Path, FileEntry]]) -> None:
    """Read ``files`` and raise ConfigError, naming the file, if one cannot be read or its checksum differs."""
    for path, entry in files:
        try:
            with open(path, "rb", buffering=0) as file:
                actual = checksum(file)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; prepare the tokens again") from None
        if actual != entry.xxh3_128:
            raise ConfigError(f"{path}: damaged, the checksum differs; prepare the tokens again")


class Tokens:
    """The tokens of one split across all parts, read from the files on access; supports ``len`` and slices.

    Args:
        parts: the tokens of each part.
        dtype: dtype of the files.
        paths: the file of each part, for error messages.
        vocabulary: all ids in intact files are below it.
        segments: [n, 3], int64: part, first token and number of tokens of each segment of the split, in the split's
            order; None: the split consists of all parts.
    """

    def __init__(
        self,
        parts: list[np.ndarray],
        dtype: str,
        paths: list[Path],
        vocabulary: int,
        segments: np.ndarray | None = None,
    ):
        self.parts, self.dtype, self.paths, self.vocabulary = parts, np.dtype(dtype), paths, vocabulary
        if segments is None:
            segments = np.array([(number, 0, len(part)) for number, part in enumerate(parts)], np.int64).reshape(-1, 3)
        lengths = segments[:, 2]
        self._part_of, self._firsts = segments[:, 0], segments[:, 1]
        self.ends = lengths.cumsum()
        self._starts = self.ends - lengths
        self._windows = lru_cache(maxsize=None)(self._windows_of_part)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read consecutively"
        pieces = []
        for number in range(int(np.searchsorted(self.ends, start, side="right")), len(self.ends)):
            before, end = int(self._starts[number]), int(self.ends[number])
            if before >= stop:
                break
            offset = int(self._firsts[number]) - before
            pieces.append(self.parts[self._part_of[number]][offset + max(before, start) : offset + min(end, stop)])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def rows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Return ``size`` tokens from each start: [n, size] in the files' dtype.

        Raises RankError for an id beyond the vocabulary, because the model's output for it depends on the grid.
        """
        rows = self._rows(starts, size)
        if rows.size and rows.max() >= self.vocabulary:
            row, column = np.argwhere(rows >= self.vocabulary)[0].tolist()
            raise self._damaged(int(starts[row]) + column, rows[row, column])
        return rows

    def document(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from ``start`` to ``stop``. Raises RankError as ``rows`` does."""
        ids = self[start:stop]
        if len(ids) and ids.max() >= self.vocabulary:
            index = int(ids.argmax())
            raise self._damaged(start + index, ids[index])
        return ids

    def _damaged(self, place: int, token: int) -> RankError:
        number = int(np.searchsorted(self.ends, place, side="right"))
        offset = (place - int(self._starts[number]) + int(self._firsts[number])) * self.dtype.itemsize
        return RankError(
            f"{self.paths[self._part_of[number]]}: damaged, the token at byte {offset} is {token}, but the vocabulary "
            f"has {self.vocabulary} tokens; prepare the tokens again"
        )

    def _rows(self, starts: np.ndarray, size: int) -> np.ndarray:
        numbers = np.searchsorted(self.ends, starts, side="right")
        crossing = starts + size > self.ends[numbers]
        parts, places = self._part_of[numbers], starts - self._starts[numbers] + self._firsts[numbers]
        if not crossing.any() and (parts == parts[0]).all():  # the usual case
            return self._windows(int(parts[0]), size)[places]
        rows = np.empty((len(starts), size), self.dtype)
        for part in np.unique(parts).tolist():
            inside = (parts == part) & ~crossing
            if inside.any():
                rows[inside] = self._windows(part, size)[places[inside]]
        for row in np.flatnonzero(crossing).tolist():
            rows[row] = self[int(starts[row]) : int(starts[row]) + size]
        return rows

    def _windows_of_part(self, number: int, size: int) -> np.ndarray:
        """Return a view of all windows of ``size`` tokens in a part."""
        return np.lib.stride_tricks.sliding_window_view(self.parts[number], size)


@dataclass(frozen=True)
class TokenFiles:
    """A directory of token files; ``open`` checks that they are complete."""

    directory: Path
    by_index = False  # whether the index states where documents end; otherwise, end-of-text tokens do

    @property
    def location(self) -> str:
        """The path for messages."""
        return str(self.directory)

    @classmethod
    def open(cls, directory: Path) -> "TokenFiles":
        """Return the token files of a directory.

        Raises ConfigError, naming the file, if one is missing or has the wrong size, or if the header is invalid or
        does not match the tokenizer.
        """
        files = cls(directory)
        header, path = files.header, directory / tokenizers.FILE
        check_sizes(files.entries())
        if files.fingerprint() != header["tokenizer"]:
            raise ConfigError(f"{path}: not the tokenizer that made the tokens; prepare the tokens again")
        tokenizer = files.tokenizer()
        end = tokenizers.end_of_text(tokenizer, tokenizers.companions(directory))
        for key, value in (("vocabulary", tokenizers.vocabulary(tokenizer)), ("end_of_text", end)):
            if value != header[key]:
                raise ConfigError(f"{directory / HEADER}: its {key} does not match {path}; prepare the tokens again")
        return files

    @cached_property
    def header(self) -> dict:
        path = self.directory / HEADER
        try:
            return _parse_header(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: no token files there ({error}); make them with python -m gpt4d.data.prepare out=DIR"
            ) from None

    def verify(self) -> None:
        """Read all files and raise ConfigError, naming the file, if a checksum differs."""
        check_content(self.entries())

    def entries(self) -> list[tuple[Path, FileEntry]]:
        """Return every file of tokens and documents with the size and checksum with which it was written."""
        return entries(self.directory, self.header["parts"])

    def tokenizer(self) -> Tokenizer:
        return tokenizers.read(self.directory / tokenizers.FILE)

    def fingerprint(self) -> str:
        """Return a hash of the tokenizer: token files with equal fingerprints have equal ids for a text."""
        path = self.directory / tokenizers.FILE
        if not path.is_file():
            raise ConfigError(f"{path}: missing; prepare the tokens again")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def checksums(self) -> list[str]:
        """Return the checksums of the files that decide a run's samples, part after part, training split first.

        For conversations, these are all files, because they are packed by their ends.
        """
        return [
            part["files"][name]["xxh3_128"]
            for number, part in enumerate(self.header["parts"])
            for split in SPLITS
            for name in file_names(split, number, self.masked)[: None if self.masked else 1]
        ]

    def content(self) -> list[str]:
        """Return the checksums of the text, to find files of the same text."""
        return self.checksums()

    @property
    def end_of_text(self) -> int:
        return self.header["end_of_text"]

    @property
    def masked(self) -> bool:
        """Whether the documents are conversations, which have a loss mask."""
        return self.header.get("masked", False)

    @cached_property
    def first_tokens(self) -> list[int]:
        """Ids that each document begins with; for conversations, ids that the tokenizer puts before a text."""
        return tokenizers.first_tokens(self.tokenizer()) if self.masked else self.header.get(tokenizers.BEGIN, [])

    def remarks(self) -> Iterator[str]:
        """Yield sentences about the first token of documents, and about text that is not in the vocabulary."""
        tokenizer = self.tokenizer()
        if not self.masked and (own := tokenizers.first_tokens(tokenizer) or self.first_tokens):
            names = " ".join(str(tokenizer.id_to_token(token)) for token in own)
            yield (
                f"each document begins with {names}"
                if self.first_tokens
                else f"the documents begin without {names}, which the tokenizer puts before a text"
            )
        if unknown := self.header.get("unknown"):
            yield f"warning: {unknown:,} characters or words are not in the tokenizer's vocabulary"

    def tokens(self, split: str) -> Tokens:
        return self._mapped(split, "tokens", self.header["dtype"], self.header["vocabulary"])

    def mask(self, split: str) -> Tokens:
        """Return the loss mask of conversations: 1 for each token that has a loss."""
        return self._mapped(split, "msk", "uint8", 2)

    def document_ends(self, split: str) -> np.ndarray:
        """Return the end of each document in ``tokens(split)``, int64."""
        index = self._mapped(split, "idx", "uint64", 0)
        found, start = [np.empty(0, np.int64)], 0
        for part in index.parts:
            found.append(part.astype(np.int64) + start)
            start = int(found[-1][-1])
        return np.concatenate(found)

    def _mapped(self, split: str, suffix: str, dtype: str, vocabulary: int) -> Tokens:
        paths = [
            self.directory / file_name(each, number, suffix)
            for each in splits(split)
            for number, part in enumerate(self.header["parts"])
            if part[each]["documents"]
        ]
        mapped = [np.memmap(path, dtype, "r").view(np.ndarray) for path in paths]  # slicing a plain array is faster
        return Tokens(mapped, dtype, paths, vocabulary)

    def count(self, split: str, kind: str) -> int:
        """Return the number of ``tokens``, ``documents`` or tokens with a loss (``trained``) in a split."""
        return sum(part[split].get(kind, 0) for part in self.header["parts"])


def _parse_header(header: dict) -> dict:
    """Return a header read from JSON. Raises ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
    vocabulary, end = counts((header["vocabulary"], header["end_of_text"]))
    if header["dtype"] != dtype_for(vocabulary) or end >= vocabulary:
        raise ValueError(f"dtype {header['dtype']!r} and end_of_text {end} with a vocabulary of {vocabulary}")
    for key in ("tokenizer", "identity"):
        if not isinstance(header[key], str):
            raise TypeError(f"{key} is not a string")
    first = counts(header.get(tokenizers.BEGIN, []))
    if any(token >= vocabulary for token in first):
        raise ValueError(f"{tokenizers.BEGIN} {first} with a vocabulary of {vocabulary}")
    counts([header.get("unknown", 0)])
    masked = header.get("masked", False)
    if not isinstance(masked, bool):
        raise TypeError("masked is not true or false")
    check_parts(header["parts"], header["dtype"], masked)
    return header
