"""Documents: the texts of a corpus, one after the other, from files or from a dataset of the Hugging Face hub."""

import glob
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpt4d.config import ConfigError, DataConfig

_COMPRESSED = 1 << 14  # bytes decompressed at once: at the very worst they become half a gigabyte


class Document(NamedTuple):
    text: str
    where: str  # as an error names it: books.jsonl:17
    read: int = 0  # of the bytes of the corpus, this document's included, as they are in its files


def documents(config: DataConfig) -> Iterator[Document]:
    """The documents of ``data.source``, in an order that depends on nothing else; none of them is empty.

    ConfigError naming file, line and mend for what cannot be read, and for an empty one unless ``data.skip_empty``.
    """
    read = {"sotu": _texts, "text": _texts, "jsonl": _json_lines, "parquet": _parquet, "hub": _hub}[config.source]
    for document in read(config):
        text = document.text.strip()
        if text:
            yield document._replace(text=text)
        elif not config.skip_empty:
            raise ConfigError(f"{document.where}: an empty document; remove it, or set data.skip_empty=true")


def files(config: DataConfig) -> list[Path]:
    """The files of the corpus, sorted. ConfigError if the package that has them is missing.

    That ``data.path`` matches files was checked before (config.checks).
    """
    if config.source == "sotu":
        return sorted((_package("sotu") / "data" / "speeches").glob("*.txt"))
    found = set(glob.glob(os.path.expanduser(config.path), recursive=True))  # a/**/** finds them many times over
    return sorted(Path(path) for path in found if os.path.isfile(path))


def size(config: DataConfig) -> int | None:
    """The bytes of the corpus; None of a dataset of the hub, where they are not known beforehand."""
    return None if config.source == "hub" else sum(path.stat().st_size for path in files(config))


def identity(config: DataConfig) -> str:
    """What tells a corpus from another without reading it: its files with their sizes and times, or its name."""
    where: tuple = (config.source, config.column, config.skip_empty)
    if config.source == "hub":
        where += (config.path, config.subset, config.split)
        paths = sorted(path for path in Path(config.path).rglob("*") if path.is_file())  # of a local directory
    else:
        paths = files(config)
    return repr((*where, [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]))


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its own hash, so adding others moves none."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _package(name: str) -> Path:
    package = importlib.util.find_spec(name)
    if package is None:
        raise ConfigError(f"the package {name} is not installed: pip install {name}")
    return Path(package.origin).parent


def _content(path: Path, file: BinaryIO) -> BinaryIO:
    """Of .gz and .zst what is compressed in it."""
    if path.suffix not in (".gz", ".zst"):
        return file
    if not file.peek(1):
        raise EOFError("it is empty")
    return gzip.open(file) if path.suffix == ".gz" else io.BufferedReader(_Stream(_decompressed(file)))


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """What is in all the zstandard frames of a file. EOFError if the last is cut off, OSError for what is none."""
    import zstandard

    frame, rest = None, b""
    try:
        while content := rest or file.read(_COMPRESSED):
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(content)
            rest = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None
    if not frame.eof:
        raise EOFError("it is cut off")


class _Stream(io.RawIOBase):
    """Pieces of bytes as a file to read."""

    def __init__(self, pieces: Iterator[bytes]):
        self.pieces, self.here = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.here:
            piece = next(self.pieces, None)
            if piece is None:
                return 0
            self.here = memoryview(piece)
        size = min(len(buffer), len(self.here))
        buffer[:size], self.here = self.here[:size], self.here[size:]
        return size


def _in_words(error: Exception) -> str:
    """What a library says, in one line that is not too long."""
    return " ".join(str(error).split())[:300]


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({_in_words(error)}); get or make the file anew")


def _files_and_bytes_before(config: DataConfig) -> Iterator[tuple[Path, int]]:
    before = 0
    for path in files(config):
        yield path, before
        before += path.stat().st_size


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each with how far the file is read."""
    try:
        with open(path, "rb") as file, _content(path, file) as content:
            for line in content:
                yield line, file.tell()
    except (OSError, EOFError, zlib.error) as error:  # cut off, damaged, or not compressed at all
        raise _unreadable(path, error) from None


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv") from None


def _texts(config: DataConfig) -> Iterator[Document]:
    for path, before in _files_and_bytes_before(config):
        lines = [_decoded(line, f"{path}:{number}") for number, (line, _) in enumerate(_lines(path), 1)]
        yield Document("".join(lines).replace("\r\n", "\n"), str(path), before + path.stat().st_size)


def _json_lines(config: DataConfig) -> Iterator[Document]:
    for path, before in _files_and_bytes_before(config):
        for number, (line, read) in enumerate(_lines(path), 1):
            where = f"{path}:{number}"
            decoded = _decoded(line, where)
            try:
                row = json.loads(decoded)
            except (ValueError, RecursionError) as error:  # also for a number too long, or lists in lists in lists
                words = _in_words(error)
                raise ConfigError(f"{where}: not JSON to be read ({words}); mend the line, or remove it") from None
            yield Document(_text_of(row, config.column, where), where, before + read)


def _parquet(config: DataConfig) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    for path, before in _files_and_bytes_before(config):
        number = 0
        try:
            with ParquetFile(path) as file:
                bytes_per_row = path.stat().st_size / max(1, file.metadata.num_rows)
                names = file.schema_arrow.names
                columns = [config.column] if config.column in names else names
                for batch in file.iter_batches(batch_size=1000, columns=columns):
                    for row in batch.to_pylist():
                        where = f"{path}: row {number}"
                        number += 1
                        read = before + int(bytes_per_row * number)
                        yield Document(_text_of(row, config.column, where), where, read)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from None


def _hub(config: DataConfig) -> Iterator[Document]:
    try:
        rows = iter(_dataset(config))
    except Exception as error:  # of many kinds: no such name, no such split, no network
        words = _in_words(error)
        raise ConfigError(f"data.path={config.path}: no such dataset can be loaded ({words})") from None
    for number in itertools.count():
        where = f"{config.path}: row {number}"
        try:
            row = next(rows, None)
        except Exception as error:  # of many kinds too: each format has its own
            raise ConfigError(f"{where}: cannot be read ({_in_words(error)}); mend the dataset") from None
        if row is None:
            return
        yield Document(_text_of(row, config.column, where), where)


def _dataset(config: DataConfig) -> Iterable[dict]:
    """A dataset by its name, or from a directory: one that ``save_to_disk`` made, or a copy of the hub's files."""
    import datasets

    directory = Path(config.path)
    if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
        rows = datasets.load_from_disk(config.path)
        return rows[config.split] if isinstance(rows, datasets.DatasetDict) else rows
    return datasets.load_dataset(config.path, config.subset, split=config.split, streaming=True)


def _text_of(row, column: str, where: str) -> str:
    """ConfigError if there is none, or what is there could not be written to a file again."""
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        there = ", ".join(key for key, value in row.items() if isinstance(value, str)) if isinstance(row, dict) else ""
        raise ConfigError(f"{where}: no text under data.column={column}; it has text under: {there or 'nothing'}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:  # "\ud800" in JSON
        raise ConfigError(
            f"{where}: character {error.start} of data.column={column} is half of a surrogate pair; mend the line, "
            "or remove it"
        ) from None
    return row[column]
