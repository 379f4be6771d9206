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
from gpt4d.data import tokenizers
from gpt4d.files import Entry, checksum

HEADER = "header.json"
FORMAT = 2
SPLITS = ("train", "validation")


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
            before = int(self.ends[number]) - len(self.parts[number])
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

    def tolist(self) -> list[int]:
        return self[:].tolist()


@dataclass(frozen=True)
class TokenFiles:
    """A directory of token files that is whole: ``opened`` makes sure of it."""

    directory: Path

    @classmethod
    def opened(cls, directory: Path) -> "TokenFiles":
        """ConfigError, naming the file, if there are none, one is missing, or one is not as long as it was."""
        files = cls(directory)
        for path, entry in files.entries():
            size = path.stat().st_size if path.is_file() else None
            if size != entry.bytes:
                found = "missing" if size is None else f"{size:,} bytes long, {entry.bytes:,} were written"
                raise ConfigError(f"{path}: {found}; prepare the tokens anew")
        if files.fingerprint() != files.header["tokenizer"]:
            raise ConfigError(
                f"{directory / 'tokenizer.json'}: not the one the tokens were made with; prepare them anew"
            )
        return files

    @cached_property
    def header(self) -> dict:
        path = self.directory / HEADER
        try:
            header = json.loads(path.read_bytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
            return header
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: no token files there ({error}); make them with python -m gpt4d.data.prepare out=DIR"
            ) from None

    def entries(self) -> Iterator[tuple[Path, Entry]]:
        """The files and what was written to them."""
        for part in self.header["parts"]:
            for file, entry in part["files"].items():
                yield self.directory / file, Entry(**entry)

    def verify(self) -> None:
        """ConfigError, naming the file, if one is not what was written. Reads all of them."""
        for path, entry in self.entries():
            with open(path, "rb", buffering=0) as file:
                if checksum(file) != entry.xxh3_128:
                    raise ConfigError(f"{path}: damaged, its checksum is another; prepare the tokens anew")

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
        dtype = self.header["dtype"]
        return Tokens(list(self._mapped(split, "bin", dtype)), dtype)

    def document_ends(self, split: str) -> Iterator[np.ndarray]:
        """Of each part: where its documents end, their end-of-text included, counted from its beginning."""
        return self._mapped(split, "idx", "uint64")

    def _mapped(self, split: str, suffix: str, dtype: str) -> Iterator[np.ndarray]:
        for number, part in enumerate(self.header["parts"]):
            if part[split]["documents"]:
                mapped = np.memmap(self.directory / file_name(split, number, suffix), dtype=dtype, mode="r")
                yield mapped.view(np.ndarray)  # a plain array is sliced faster

    def count(self, split: str, what: str) -> int:
        """Of ``tokens`` or ``documents``."""
        return sum(part[split][what] for part in self.header["parts"])


def file_name(split: str, part: int, suffix: str) -> str:
    return f"{split}_{part:05}.{suffix}"
