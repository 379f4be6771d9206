"""The format of Megatron's indexed datasets, version 1: the tokens in PREFIX.bin, the documents in PREFIX.idx.

The index is little-endian. Its header has the magic bytes, the version (uint64), the code of the tokens' dtype (uint8),
the number of sequences and the number of document bounds (uint64 each). Three arrays follow:

- the length of each sequence in tokens (int32)
- the first byte of each sequence in PREFIX.bin (int64)
- the document bounds (int64): the first sequence of each document, and the number of sequences

A document has one sequence, or several if it was split into sentences.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt4d.config import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_REMEDY = "make both files again with Megatron's tools/preprocess_data.py"


def tokens_file(prefix: str) -> Path:
    """Return the file of the tokens."""
    return Path(f"{prefix}.bin")


def index_file(prefix: str) -> Path:
    """Return the file of the index."""
    return Path(f"{prefix}.idx")


class Index(NamedTuple):
    """Documents of an indexed dataset.

    Attributes:
        dtype: dtype of the tokens, an integer.
        bounds: [documents + 1], int64: document i has the tokens ``bounds[i]`` to ``bounds[i + 1]``.
    """

    dtype: np.dtype
    bounds: np.ndarray

    @classmethod
    def read(cls, prefix: str) -> "Index":
        """Read the index of ``prefix``.

        Raises ConfigError, naming the file, if a file is missing, truncated or of another format, or if PREFIX.bin is
        shorter than the index states.
        """
        path = index_file(prefix)
        try:
            with open(path, "rb") as file:
                header = file.read(_HEADER.size)
            sizes = path.stat().st_size, tokens_file(prefix).stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; use a prefix PREFIX for which PREFIX.bin and PREFIX.idx exist"
            ) from None
        if not header.startswith(_MAGIC[: len(header)]):
            raise _invalid(path, "not the index of a Megatron dataset")
        if len(header) < _HEADER.size:
            raise _invalid(path, f"truncated, its {len(header)} bytes are no complete header")
        _, version, code, sequences, documents = _HEADER.unpack(header)
        if version != 1:
            raise _invalid(path, f"version {version} of the format, and only version 1 is known")
        if code not in _DTYPES:
            raise _invalid(path, f"dtype code {code} is not between 1 and 8")
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        if dtype.kind == "f":
            raise _invalid(path, f"dtype code {code} means {_DTYPES[code]}, but tokens are integers")
        stated = _HEADER.size + 12 * sequences + 8 * documents  # datasets of several modalities have more bytes
        if sizes[0] < stated:
            raise _invalid(path, f"truncated, {sizes[0]:,} bytes instead of {stated:,}")
        bounds = _bounds(path, sequences, documents, dtype.itemsize)
        if sizes[1] < (stated := int(bounds[-1]) * dtype.itemsize):
            raise _invalid(tokens_file(prefix), f"truncated, {sizes[1]:,} bytes, but {path} states {stated:,}")
        return cls(dtype, bounds)


def _bounds(path: Path, sequences: int, documents: int, itemsize: int) -> np.ndarray:
    """Return the bounds of the documents in tokens. Raises ConfigError if the arrays of an index contradict."""
    content, places = np.memmap(path, "u1", "r"), np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    lengths, pointers, firsts = (
        content[start:stop].view(dtype)
        for start, stop, dtype in zip(places, places[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    if not documents or firsts[0] != 0 or firsts[-1] != sequences or (firsts[1:] < firsts[:-1]).any():
        raise _invalid(path, f"damaged, its documents do not contain its {sequences:,} sequences")
    ends = lengths.cumsum(dtype=np.int64)
    if (lengths < 0).any() or not np.array_equal(pointers, (ends - lengths) * itemsize):
        raise _invalid(path, "damaged, its sequences are not consecutive")
    return np.concatenate([[0], ends])[firsts]


def _invalid(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}; {_REMEDY}")
