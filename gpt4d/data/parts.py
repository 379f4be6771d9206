"""Parts of token files: how they are written, and whether what is said of them is so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.files import FileEntry, NewFile, checksum, counts

SPLITS = ("train", "validation")


def file_name(split: str, part: int, suffix: str) -> str:
    return f"{split}_{part:05}.{suffix}"


def dtype_for(vocabulary: int) -> str:
    """The type of the ids below ``vocabulary``."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


class Part:
    """The files of a part while they are written."""

    def __init__(self, directory: Path, number: int):
        self.directory, self.number = directory, number
        self.counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
        self.files = {
            (split, suffix): NewFile(directory / file_name(split, number, suffix))
            for split in SPLITS
            for suffix in ("bin", "idx")
        }

    @property
    def documents(self) -> int:
        return sum(count["documents"] for count in self.counts.values())

    def add(self, split: str, ids: np.ndarray) -> None:
        count = self.counts[split]
        count["tokens"] += len(ids)
        count["documents"] += 1
        self.files[split, "bin"].write(ids.data.cast("B"))
        self.files[split, "idx"].write(np.asarray([count["tokens"]], np.uint64).data.cast("B"))

    def told(self) -> dict:
        files = {file_name(s, self.number, suffix): f.entry._asdict() for (s, suffix), f in self.files.items()}
        return {**self.counts, "files": files}

    def remove(self) -> None:
        for split, suffix in self.files:
            (self.directory / file_name(split, self.number, suffix)).unlink()

    def __enter__(self) -> None: ...

    def __exit__(self, *error) -> None:
        for file in self.files.values():
            file.__exit__(*error)


def checked(parts: Any, dtype: str) -> list[dict]:
    """What JSON says of parts, if it is what ``Part.told`` can have said. ValueError, KeyError or TypeError if not."""
    itemsize = np.dtype(dtype).itemsize
    for number, part in enumerate(parts):
        sizes = {}
        for split in SPLITS:
            counts(part[split].values())
            sizes[file_name(split, number, "bin")] = part[split]["tokens"] * itemsize
            sizes[file_name(split, number, "idx")] = part[split]["documents"] * 8
        files = {name: FileEntry(**entry) for name, entry in part["files"].items()}
        if {name: entry.bytes for name, entry in files.items()} != sizes:
            raise ValueError(f"part {number} does not have the files of its tokens and documents")
        if not all(isinstance(entry.xxh3_128, str) for entry in files.values()):
            raise TypeError(f"part {number} has a file without a checksum")
    return list(parts)


def entries(directory: Path, parts: list[dict]) -> Iterator[tuple[Path, FileEntry]]:
    """The files and what was written to them."""
    for part in parts:
        for file, entry in part["files"].items():
            yield directory / file, FileEntry(**entry)


def check_sizes(directory: Path, parts: list[dict]) -> None:
    """ConfigError, naming the file, if one is missing or not as long as it was."""
    for path, entry in entries(directory, parts):
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "missing" if size is None else f"{size:,} bytes long, {entry.bytes:,} were written"
            raise ConfigError(f"{path}: {found}; prepare the tokens anew")


def check_content(directory: Path, parts: list[dict]) -> None:
    """ConfigError, naming the file, if one is not what was written. Reads all of them."""
    for path, entry in entries(directory, parts):
        with open(path, "rb", buffering=0) as file:
            if checksum(file) != entry.xxh3_128:
                raise ConfigError(f"{path}: damaged, its checksum is another; prepare the tokens anew")
