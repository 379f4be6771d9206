"""Documents: the texts of a corpus, one after the other, from files or from a dataset of the Hugging Face hub."""

import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpt4d.config import ConfigError, DataConfig


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
    found = glob.glob(os.path.expanduser(config.path), recursive=True)
    return sorted(Path(path) for path in found if os.path.isfile(path))


def size(config: DataConfig) -> int | None:
    """The bytes of the corpus; None of a dataset of the hub, where they are not known beforehand."""
    return None if config.source == "hub" else sum(path.stat().st_size for path in files(config))


def identity(config: DataConfig) -> str:
    """What tells a corpus from another without reading it: its files with their sizes and times, or its name."""
    if config.source == "hub":
        return repr((config.path, config.subset, config.split, config.column))
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files(config)]
    return repr((config.source, config.column, config.skip_empty, found))


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
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.open(file, "rb"))
    return file


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({error}); get or make the file anew")


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
    except (OSError, EOFError) as error:  # cut off, or not compressed at all
        raise _unreadable(path, error) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
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
            try:
                row = json.loads(_decoded(line, where))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not JSON ({error}); mend the line, or remove it") from None
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
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from None


def _hub(config: DataConfig) -> Iterator[Document]:
    """A dataset by its name, or from a directory: one that ``save_to_disk`` made, or a copy of the hub's files."""
    import datasets

    directory = Path(config.path)
    try:
        if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(config.path)
            rows = rows[config.split] if isinstance(rows, datasets.DatasetDict) else rows
        else:
            rows = datasets.load_dataset(config.path, config.subset, split=config.split, streaming=True)
        rows = iter(rows)
    except Exception as error:  # of many kinds: no such name, no such split, no network
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"data.path={config.path}: no such dataset can be loaded ({words})") from None
    for number, row in enumerate(rows):
        where = f"{config.path}: row {number}"
        yield Document(_text_of(row, config.column, where), where)


def _text_of(row, column: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        there = ", ".join(key for key, value in row.items() if isinstance(value, str)) if isinstance(row, dict) else ""
        raise ConfigError(f"{where}: no text under data.column={column}; it has text under: {there or 'nothing'}")
    return row[column]
