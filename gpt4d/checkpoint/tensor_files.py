"""The files of a checkpoint directory: manifest, index of the tensors, and raw values.

Each rank writes one file of raw values, ``rank_00003.bin``. The index ``tensors.json`` lists for each global tensor its
dtype, shape and chunks, each with its file and byte offset. The index contains no ranks or grids, so a rank of any grid
reads the region it needs without more planning. ``manifest.json`` lists the size and checksum of each file. There are
no pickles. This module imports torch when it reads the index or values.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from gpt4d.config import ConfigError
from gpt4d.parallel.lazy import torch
from gpt4d.runtime import activity
from gpt4d.runtime.files import FileEntry, NewFile, checksum, counts, open_no_link, sync, write_file

T = TypeVar("T")
Region = tuple[tuple[int, int], ...]  # (start, stop) along each dim of a global tensor

MANIFEST, TENSORS = "manifest.json", "tensors.json"
_DTYPES = "float64", "float32", "bfloat16", "float16"
_ALIGNMENT = 64  # bytes, so that any dtype can be read in place


class Damaged(ConfigError):
    """Error of a checkpoint whose files differ from the written files. The message names the file."""


class Chunk(NamedTuple):
    """A region of a global tensor, and the file and offset of its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte offset


@dataclass
class StoredTensor:
    """A global tensor on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    def to_json(self) -> dict:
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": self.shape, "chunks": self.chunks}

    @classmethod
    def from_json(cls, values: dict) -> StoredTensor:
        shape, chunks = counts(values["shape"]), []
        for offsets, sizes, file, start in values["chunks"]:
            chunk = Chunk(counts(offsets), counts(sizes), file, *counts([start]))
            if not (len(chunk.offsets) == len(chunk.sizes) == len(shape) and isinstance(file, str)):
                raise ValueError(f"{chunk} does not match a tensor of shape {shape}")
            chunks.append(chunk)
        if values["dtype"] not in _DTYPES:
            raise KeyError(values["dtype"])
        return cls(getattr(torch, values["dtype"]), shape, chunks)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Return why the chunks do not cover the tensor exactly once, or None if they do."""
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            return "the chunks and the tensor differ in their number of elements"
        if not all(math.prod(chunk.sizes) for chunk in self.chunks):
            return "a chunk is empty"
        starts = np.array([chunk.offsets for chunk in self.chunks])
        stops = starts + np.array([chunk.sizes for chunk in self.chunks])
        if (stops > np.array(self.shape)).any():
            return "a chunk exceeds the tensor's shape"
        return "two chunks overlap" if len(self.chunks) > 1 and _overlap(starts, stops) else None


def _overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Return whether two of n boxes have a common element. ``starts`` and ``stops`` (exclusive) are [n, dims]."""
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))  # leaves the fewest pairs
    order = starts[:, dim].argsort()
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim])  # boxes from here on begin after the box's end
    for box in np.flatnonzero(ends > np.arange(len(ends)) + 1).tolist():
        later = slice(box + 1, ends[box])
        if ((starts[box] < stops[later]) & (starts[later] < stops[box])).all(-1).any():
            return True
    return False


class Files:
    """The tensors of a checkpoint directory, memory-mapped, so that values are loaded on access.

    Methods raise Damaged, naming the file, if a file does not match ``tensors.json``.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._mapped: dict[str, torch.Tensor] = {}
        self.tensors = parse_json(
            directory / TENSORS, lambda values: {name: StoredTensor.from_json(t) for name, t in values.items()}
        )

    def check(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Raise Damaged unless the tensor's chunks lie in files of the manifest and cover it exactly once."""
        tensor = self.tensors[name]
        problem = tensor.problem()
        for chunk in tensor.chunks:
            if chunk.file not in entries:
                problem = f"{chunk.file!r} is not listed in the manifest"
            else:
                self.chunk_values(tensor, chunk)
        if problem:
            raise Damaged(f"{self.directory / TENSORS}: {name}: {problem}")

    def chunk_values(self, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """Return a chunk as a read-only view of its file."""
        end = chunk.start + math.prod(chunk.sizes) * tensor.dtype.itemsize
        values = self._bytes(chunk.file)[chunk.start : end]
        if chunk.start % tensor.dtype.itemsize or len(values) != end - chunk.start:
            raise Damaged(f"{self.directory / TENSORS}: a chunk lies outside {chunk.file}")
        return values.view(tensor.dtype).view(chunk.sizes)

    def global_tensor(self, name: str) -> torch.Tensor:
        """Return a global tensor, loaded into memory."""
        tensor = self.tensors[name]
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(name, tuple((0, extent) for extent in tensor.shape), result)
        return result

    def read(self, name: str, region: Region, into: torch.Tensor) -> None:
        """Fill ``into`` with a region of a global tensor, from all chunks that overlap the region."""
        tensor, elements_read = self.tensors[name], 0
        for chunk in tensor.chunks:
            ends = zip(region, chunk.offsets, chunk.sizes, strict=True)
            common = [(max(start, o), min(stop, o + size)) for (start, stop), o, size in ends]
            if all(start < stop for start, stop in common):
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, region, strict=True))
                into[target] = self.chunk_values(tensor, chunk)[source]
                activity.progress()
                elements_read += math.prod(b - a for a, b in common)
        if elements_read != into.numel():
            raise Damaged(f"{self.directory / TENSORS}: the chunks of {name} do not cover it")

    def _bytes(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            path = self.directory / name
            if path.parent != self.directory:
                raise Damaged(f"{self.directory / TENSORS}: {name!r} is not a file name in this directory")
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            self._mapped[name] = torch.from_file(str(path), size=size, dtype=torch.uint8)
        return self._mapped[name]


def write_values(path: Path, tensors: Iterable[torch.Tensor]) -> tuple[FileEntry, list[int]]:
    """Write the tensors' values to a new file. Returns its manifest entry and the byte offset of each tensor."""
    starts = []
    with NewFile(path) as file:
        for tensor in tensors:
            file.write(bytes(-file.size % _ALIGNMENT))
            starts.append(file.size)
            values = tensor.detach().cpu().contiguous().view(-1)
            file.write(values.view(torch.uint8).numpy().data)
    return file.entry, starts


def complete_directory(
    directory: Path, written: Iterable[tuple[dict[str, dict], dict[str, Any]]], documents: Mapping[str, bytes]
) -> None:
    """Add the index, the ``documents`` and the manifest to a directory with files of values.

    ``written``: for each rank the tensors in its file by name (``StoredTensor.to_json``), and the file's entry by name.
    The entry may be a list, as read from JSON. Raises ValueError unless the files contain each tensor exactly once.
    """
    index: dict[str, dict] = {}
    entries: dict[str, FileEntry] = {}
    for tensors, files in written:
        for name, tensor in tensors.items():
            index.setdefault(name, {**tensor, "chunks": []})["chunks"] += tensor["chunks"]
        entries |= {file: FileEntry(*entry) for file, entry in files.items()}
    for name, tensor in index.items():
        if problem := StoredTensor.from_json(tensor).problem():
            raise ValueError(f"{directory / TENSORS}: {name}: {problem}")
    for name, content in {**documents, TENSORS: json.dumps(index).encode()}.items():
        entries[name] = write_file(directory / name, content)
    write_manifest(directory, entries)


def write_manifest(directory: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write and sync the manifest of a directory whose files are on disk, then sync the directory."""
    files = {name: entry._asdict() for name, entry in sorted(entries.items())}
    document = {"files": files, "xxh3_128": _checksum(files)}
    write_file(directory / MANIFEST, json.dumps(document, indent=1).encode())
    sync(directory)


def read_manifest(directory: Path) -> dict[str, FileEntry]:
    """Return the entries by file name. Raises Damaged if the manifest is missing or its checksum does not match."""

    def entries(document: dict) -> dict[str, FileEntry]:
        if document["xxh3_128"] != _checksum(document["files"]):
            raise ValueError("checksum mismatch")
        if odd := [name for name in document["files"] if Path(name).name != name or not name.isprintable()]:
            raise ValueError(f"{odd[0]!r} is not a file name in this directory")
        return {
            name: FileEntry(counts([entry["bytes"]])[0], str(entry["xxh3_128"]))
            for name, entry in document["files"].items()
        }

    return parse_json(directory / MANIFEST, entries)


def check_files(directory: Path, entries: Mapping[str, FileEntry], names: Iterable[str]) -> None:
    """Check the named files against the sizes and checksums of their entries.

    Raises Damaged on a mismatch or a missing file, ConfigError if a file cannot be read.
    """
    for name in names:
        path, expected = directory / name, entries[name]
        if Path(name).name != name:
            raise Damaged(f"{directory / MANIFEST}: {name!r} is not a file name in this directory")
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    raise Damaged(f"{path}: {size:,} bytes long, but {expected.bytes:,} were written")
                if checksum(file) != expected.xxh3_128:
                    raise Damaged(f"{path}: damaged, checksum mismatch")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def parse_json(path: Path, convert: Callable[[Any], T]) -> T:
    """Read a checkpoint's JSON file and ``convert`` its value.

    Raises Damaged if the file is missing or cannot be converted, ConfigError if it cannot be read: an unreachable disk
    is not damage.
    """
    try:
        with open_regular(path) as file:
            return convert(json.loads(file.read()))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: damaged ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def open_regular(path: Path):
    """Open a checkpoint's file unbuffered. Raises Damaged unless it is a regular file: checkpoints may be untrusted."""
    try:
        return open(path, "rb", buffering=0, opener=open_no_link)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path}: missing") from None
    except OSError as error:
        problems = {errno.ELOOP: "a link; replace it with the file itself", errno.EINVAL: "not a regular file"}
        if error.errno in problems:
            raise Damaged(f"{path}: {problems[error.errno]}") from None
        raise ConfigError(f"{path}: {error.strerror}") from None


def _checksum(files: Mapping) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
