"""Token files: a corpus as numbers, mapped into memory.

A directory has the files of its parts, ``train_00000.bin`` and ``validation_00000.bin`` of uint16 or uint32, beside
each an index, ``train_00000.idx``, of the uint64 ends of its documents, the ``tokenizer.json``, and last of all
``header.json``: what there is, with sizes and checksums.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.data import parts, tokenizers
from gpt4d.files import counts

HEADER = "header.json"
FORMAT = 3


class Tokens:
    """The tokens of one split, of all parts: ``len`` and slices, read from the files when they are asked for."""

    def __init__(self, parts: list[np.ndarray], dtype: str):
        self.parts, self.dtype = parts, np.dtype(dtype)
        lengths = np.array([len(part) for part in parts], np.int64)
        self.ends = lengths.cumsum()
        self._begins = self.ends - lengths
        self._windows = lru_cache(maxsize=None)(self._all_windows)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read in a row"
        found = []
        for number in range(int(np.searchsorted(self.ends, start, side="right")), len(self.parts)):
            before = int(self._begins[number])
            if before >= stop:
                break
            found.append(self.parts[number][max(0, start - before) : stop - before])
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])

    def rows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """From each start so many tokens: [n, size], as the files have them."""
        numbers = np.searchsorted(self.ends, starts, side="right")
        across = starts + size > self.ends[numbers]
        if not across.any() and (numbers == numbers[0]).all():  # nearly always
            return self._windows(int(numbers[0]), size)[starts - self._begins[numbers[0]]]
        rows = np.empty((len(starts), size), self.dtype)
        for number in np.unique(numbers).tolist():
            of_it = (numbers == number) & ~across
            if of_it.any():
                rows[of_it] = self._windows(number, size)[starts[of_it] - self._begins[number]]
        for row in np.flatnonzero(across).tolist():
            rows[row] = self[int(starts[row]) : int(starts[row]) + size]
        return rows

    def _all_windows(self, number: int, size: int) -> np.ndarray:
        """Every row of so many tokens that there is in a part, without a copy."""
        return np.lib.stride_tricks.sliding_window_view(self.parts[number], size)


@dataclass(frozen=True)
class TokenFiles:
    """A directory of token files that is whole: ``opened`` makes sure of it."""

    directory: Path

    @classmethod
    def opened(cls, directory: Path) -> "TokenFiles":
        """ConfigError, naming the file, if there are none, one is missing or not as long as it was, or what the header
        says is not so."""
        files = cls(directory)
        header, tokenizer = files.header, directory / "tokenizer.json"
        parts.check_sizes(directory, header["parts"])
        if files.fingerprint() != header["tokenizer"]:
            raise ConfigError(f"{tokenizer}: not the one the tokens were made with; prepare them anew")
        found = files.tokenizer()
        for key, of in (("vocabulary", tokenizers.vocabulary), ("end_of_text", tokenizers.end_of_text)):
            if of(found) != header[key]:
                raise ConfigError(f"{directory / HEADER}: its {key} is not that of {tokenizer}; prepare them anew")
        return files

    @cached_property
    def header(self) -> dict:
        path = self.directory / HEADER
        try:
            return _checked(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: no token files there ({error}); make them with python -m gpt4d.data.prepare out=DIR"
            ) from None

    def verify(self) -> None:
        """ConfigError, naming the file, if one is not what was written. Reads all of them."""
        parts.check_content(self.directory, self.header["parts"])

    def tokenizer(self) -> Tokenizer:
        return tokenizers.read(self.directory / "tokenizer.json")

    def fingerprint(self) -> str:
        """Of the tokenizer: two with the same give the same ids."""
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: missing; prepare the tokens anew")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    @property
    def end_of_text(self) -> int:
        return self.header["end_of_text"]

    def tokens(self, split: str) -> Tokens:
        return Tokens(list(self._mapped(split)), self.header["dtype"])

    def _mapped(self, split: str) -> Iterator[np.ndarray]:
        for number, part in enumerate(self.header["parts"]):
            if part[split]["documents"]:
                path = self.directory / parts.file_name(split, number, "bin")
                yield np.memmap(path, self.header["dtype"], "r").view(np.ndarray)  # a plain array is sliced faster

    def count(self, split: str, what: str) -> int:
        """Of ``tokens`` or ``documents``."""
        return sum(part[split][what] for part in self.header["parts"])


def _checked(header: dict) -> dict:
    """What JSON says of token files. ValueError, KeyError, TypeError or AttributeError if it cannot be so."""
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
    vocabulary, end = counts((header["vocabulary"], header["end_of_text"]))
    if header["dtype"] != parts.dtype_for(vocabulary) or end >= vocabulary:
        raise ValueError(f"ids of {header['dtype']!r} and the end {end} with a vocabulary of {vocabulary}")
    for key in ("tokenizer", "identity"):
        if not isinstance(header[key], str):
            raise TypeError(f"{key} is no text")
    parts.checked(header["parts"], header["dtype"])
    return header
