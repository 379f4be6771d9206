"""Megatron's indexed datasets as the training data of a run: tokens read in place, and documents held out by hash.

The format, version 1, has the tokens in PREFIX.bin and the documents in PREFIX.idx.
The index is little-endian. Its header has the magic bytes, the version (uint64), the code of the tokens' dtype (uint8),
the number of sequences and the number of document bounds (uint64 each). Three arrays follow:

- the length of each sequence in tokens (int32)
- the first byte of each sequence in PREFIX.bin (int64)
- the document bounds (int64): the first sequence of each document, and the number of sequences

A document has one sequence, or several if it was split into sentences.

A directory in the cache states which documents are held out. It contains two files of int64 for each split. The file
``train_00000.segments`` has the first token and the number of tokens of each run of consecutive documents of the split.
The file ``train_00000.ends`` has the end of each document in the tokens of the split. The directory also contains the
tokenizer of ``data.tokenizer``, if that is set, and, written last, ``header.json``.
"""

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt4d.config import HEADER, ConfigError, DataConfig
from gpt4d.data import sources, tokenizers, transformers_tokenizer
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.data.directory import SPLITS, ReportTimer, clear, in_cache, printer, write_once
from gpt4d.data.tokens import ALL, TokenFiles, Tokens, entries, file_name, splits
from gpt4d.runtime import activity
from gpt4d.runtime.files import write_file

FORMAT = 1
_BLOCK_TOKENS = 1 << 24  # read at a time, so that progress is visible
_SEGMENTS, _ENDS = "segments", "ends"
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
    """Documents of an indexed dataset."""

    dtype: np.dtype  # of the tokens, an integer
    bounds: np.ndarray  # [documents + 1], int64: document i has the tokens bounds[i] to bounds[i + 1]

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


@dataclass(frozen=True)
class MegatronFiles(TokenFiles):
    """PREFIX.bin, and the directory in the cache with the index of its splits."""

    prefix: str
    by_index = True

    @property
    def location(self) -> str:
        return self.prefix

    @cached_property
    def header(self) -> dict:
        path = self.directory / HEADER
        try:
            header = json.loads(path.read_bytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
            for path, entry in entries(self.directory, header["parts"]):
                if (size := path.stat().st_size) != entry.bytes:
                    raise ValueError(f"{size:,} bytes instead of {entry.bytes:,}")
            return header
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: missing or damaged ({error}); remove {self.directory}, and the next start writes it again"
            ) from None

    def fingerprint(self) -> str:
        """Return a hash of the tokenizer; empty without a tokenizer."""
        return super().fingerprint() if self.header["end_of_text"] is not None else ""

    def checksums(self) -> list[str]:
        return self.header["samples"]

    def content(self) -> list[str]:
        return self.header["samples"][:-1]  # without data.validation_fraction

    @cached_property
    def first_tokens(self) -> list[int]:
        if self.header["end_of_text"] is None:
            return []
        own = tokenizers.first_tokens(self.tokenizer())
        return own if self.tokens(ALL)[: len(own)].tolist() == own else []

    def tokens(self, split: str) -> Tokens:
        header, path = self.header, tokens_file(self.prefix)
        try:
            tokens = np.memmap(path, header["dtype"], "r", shape=(header["tokens"],)).view(np.ndarray)
        except ValueError as error:
            raise ConfigError(f"{path}: changed after the first start ({error}); restore the file") from None
        lengths = np.concatenate([self._array(each, _SEGMENTS).reshape(-1, 2) for each in splits(split)])
        segments = np.column_stack([np.zeros(len(lengths), np.int64), lengths])
        return Tokens([tokens], header["dtype"], [path], header["vocabulary"], segments)

    def document_ends(self, split: str) -> np.ndarray:
        ends, start = [], 0
        for each in splits(split):
            ends.append(self._array(each, _ENDS) + start)
            start = self.count(each, "tokens")
        return np.concatenate(ends)

    def _array(self, split: str, suffix: str) -> np.ndarray:
        path = self.directory / file_name(split, 0, suffix)
        return np.memmap(path, np.int64, "r").view(np.ndarray) if path.stat().st_size else np.empty(0, np.int64)


def megatron_files(config: DataConfig, path: str) -> MegatronFiles:
    """Return Megatron's files with the prefix ``path``, whose splits are prepared unless they are in the cache.

    Raises ConfigError for files that cannot be used, and if a token is not in the vocabulary of ``data.tokenizer``, or
    without it in the vocabulary of the model.
    """
    prefix = os.path.expanduser(path)
    with activity.unlimited():  # a tokenizer may be downloaded
        tokenizer = transformers_tokenizer.from_config(config) if config.tokenizer else {}
        Index.read(prefix)
        paths = [CorpusFile.local(path) for path in (tokens_file(prefix), index_file(prefix))]
        content = [fact[1:] for fact in sources.facts(config, paths)[-1]]
    samples = [*map(str, content), str(config.validation_fraction)]
    facts = FORMAT, samples, sorted(tokenizer.items())
    directory = in_cache(config, hashlib.sha256(repr(facts).encode()).hexdigest())
    report = printer(prefix)
    write_once(directory, lambda partial: _write(config, prefix, tokenizer, samples, partial, report), report)
    files = MegatronFiles(directory, prefix)
    largest = files.header["largest"]
    if largest >= files.header["vocabulary"]:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: it has {files.header['vocabulary']} tokens, and the largest token of "
            f"{tokens_file(prefix)} is {largest}; use the tokenizer that made the file"
        )
    if config.tokenizer_vocab is not None and largest >= config.tokenizer_vocab:
        raise ConfigError(
            f"{tokens_file(prefix)}: its largest token is {largest}, and data.tokenizer_vocab="
            f"{config.tokenizer_vocab}; set model.vocab_size={largest + 1} or more, and data.tokenizer_vocab if set"
        )
    return files


def _write(
    config: DataConfig,
    prefix: str,
    tokenizer: dict[str, bytes],
    samples: list[str],
    directory: Path,
    on_progress: Callable[[str], None],
) -> dict:
    """Write the index of the splits, and return the header.

    Raises ConfigError if there is no token to train on, or a token is negative.
    """
    clear(directory)
    index = Index.read(prefix)
    held_out, largest = _read(config, prefix, index, on_progress)
    lengths = np.diff(index.bounds)
    part: dict = {"files": {}}
    for split in SPLITS:
        chosen = held_out == (split == "validation")
        ends = lengths[chosen].cumsum()
        part[split] = {"tokens": int(lengths[chosen].sum()), "documents": len(ends)}
        for suffix, array in ((_SEGMENTS, _segments(index.bounds, chosen)), (_ENDS, ends)):
            name = file_name(split, 0, suffix)
            part["files"][name] = write_file(directory / name, array.tobytes())._asdict()
    if not part["train"]["tokens"]:
        if part["validation"]["tokens"]:
            raise ConfigError(f"{prefix}: every document is held out; set data.validation_fraction=0")
        raise ConfigError(f"{tokens_file(prefix)}: there is no token to train on; use another prefix")
    for name, content in tokenizer.items():
        write_file(directory / name, content)
    own = tokenizers.read(directory / tokenizers.FILE) if tokenizer else None
    return {
        "format": FORMAT,
        "samples": samples,
        "dtype": index.dtype.str.replace("i", "u"),
        "tokens": int(index.bounds[-1]),
        "largest": largest,
        "vocabulary": tokenizers.vocabulary(own) if own else largest + 1,
        "end_of_text": tokenizers.end_of_text(own, tokenizer) if own else None,
        "parts": [part],
    }


def _read(config: DataConfig, prefix: str, index: Index, on_progress: Callable[[str], None]) -> tuple[np.ndarray, int]:
    """Return whether each document is held out, and the largest token. Raises ConfigError for a negative token."""
    path, bounds = tokens_file(prefix), index.bounds
    held_out, largest = np.zeros(len(bounds) - 1, bool), -1
    total = int(bounds[-1])
    tokens = np.memmap(path, index.dtype, "r", shape=(total,)).view(np.ndarray) if total else np.empty(0, index.dtype)
    timer, start = ReportTimer(), 0
    while start < len(held_out):
        stop = max(start + 1, int(np.searchsorted(bounds, bounds[start] + _BLOCK_TOKENS)) - 1)
        block = bounds[start : stop + 1].tolist()
        if block[-1] > block[0]:
            values = tokens[block[0] : block[-1]]
            largest = max(largest, int(values.max()))
            if (smallest := int(values.min())) < 0:
                raise ConfigError(
                    f"{path}: one of its tokens is {smallest}; make the file again, tokens are not negative"
                )
        if config.validation_fraction:
            held_out[start:stop] = [
                sources.is_held_out(tokens[first:end].data, config.validation_fraction)
                for first, end in itertools.pairwise(block)
            ]
        start = stop
        activity.progress()
        if timer.is_due():
            on_progress(f"{start:,} documents, {block[-1] / max(1, total):.0%} read")
    return held_out, largest


def _segments(bounds: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return [n, 2]: first token and number of tokens of each run of consecutive chosen documents that has tokens."""
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    firsts, stops = bounds[np.flatnonzero(edges == 1)], bounds[np.flatnonzero(edges == -1)]
    return np.column_stack([firsts, stops - firsts])[stops > firsts]
