"""Parts of token files: write them, and check them against the header that describes them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.runtime.files import FileEntry, NewFile, checksum, counts

SPLITS = ("train", "validation")


def file_name(split: str, part: int, suffix: str) -> str:
    """Return the name of a part's file, such as ``train_00003.tokens``."""
    return f"{split}_{part:05}.{suffix}"


def dtype_for(vocabulary: int) -> str:
    """Return the dtype for token ids below ``vocabulary``."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def suffixes(masked: bool) -> tuple[str, ...]:
    """Return the suffixes of a part's files: tokens, ends of documents and, with ``masked``, the loss mask."""
    return ("tokens", "idx", "msk") if masked else ("tokens", "idx")


class TokenShardWriter:
    """Writer of the files of one part: tokens and document ends of both splits, and with ``masked`` the loss mask."""

    def __init__(self, directory: Path, number: int, masked: bool = False):
        self.directory, self.number = directory, number
        self.counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
        self.files = {
            (split, suffix): NewFile(directory / file_name(split, number, suffix))
            for split in SPLITS
            for suffix in suffixes(masked)
        }

    @property
    def documents(self) -> int:
        return sum(count["documents"] for count in self.counts.values())

    def add(self, split: str, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append the token ids of a document, which must have the dtype of the files, and its mask, uint8."""
        count = self.counts[split]
        count["tokens"] += len(ids)
        count["documents"] += 1
        self.files[split, "tokens"].write(ids.data.cast("B"))
        if mask is not None:
            count["trained"] = count.get("trained", 0) + int(mask.sum())
            self.files[split, "msk"].write(mask.data.cast("B"))
        self.files[split, "idx"].write(np.asarray([count["tokens"]], np.uint64).data.cast("B"))

    def to_dict(self) -> dict:
        """Return the part's entry in the header: counts, and sizes and checksums of its files."""
        files = {file_name(s, self.number, suffix): f.entry._asdict() for (s, suffix), f in self.files.items()}
        return {**self.counts, "files": files}

    def remove(self) -> None:
        for split, suffix in self.files:
            (self.directory / file_name(split, self.number, suffix)).unlink()

    def __enter__(self) -> None: ...

    def __exit__(self, *error) -> None:
        for file in self.files.values():
            file.__exit__(*error)


def parse_parts(parts: Any, dtype: str, masked: bool = False) -> list[dict]:
    """Return parts read from JSON. Raises ValueError, KeyError or TypeError if ``to_dict`` cannot have made them."""
    itemsize = np.dtype(dtype).itemsize
    for number, part in enumerate(parts):
        sizes = {}
        for split in SPLITS:
            counts(part[split].values())
            sizes[file_name(split, number, "tokens")] = part[split]["tokens"] * itemsize
            sizes[file_name(split, number, "idx")] = part[split]["documents"] * 8
            if masked:
                sizes[file_name(split, number, "msk")] = part[split]["tokens"]
        files = {name: FileEntry(**entry) for name, entry in part["files"].items()}
        if {name: entry.bytes for name, entry in files.items()} != sizes:
            raise ValueError(f"the files of part {number} do not match its tokens and documents")
        if not all(isinstance(entry.xxh3_128, str) for entry in files.values()):
            raise TypeError(f"part {number} has a file without a checksum")
    return list(parts)


def entries(directory: Path, parts: list[dict]) -> Iterator[tuple[Path, FileEntry]]:
    """Yield every file of ``parts`` with the size and checksum it was written with."""
    for part in parts:
        for file, entry in part["files"].items():
            yield directory / file, FileEntry(**entry)


def check_sizes(directory: Path, parts: list[dict]) -> None:
    """Raise ConfigError, naming the file, if a file is missing or has another size than was written."""
    for path, entry in entries(directory, parts):
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
