"""Documents of a corpus, read sequentially from files or from a Hugging Face dataset."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpt4d.config import ConfigError, DataConfig, matching_files
from gpt4d.data import conversations, sources
from gpt4d.data.sources import one_line

_COMPRESSED_BYTES = 1 << 14  # compressed bytes per call; at the highest ratio, the result has half a gigabyte


class Document(NamedTuple):
    """The text of a document, or a conversation as JSON, and its location in the corpus."""

    text: str
    location: str  # for error messages: books.jsonl:17
    bytes_read: int = 0  # position of the document's end in the concatenated corpus files


def documents(config: DataConfig) -> Iterator[Document]:
    """Yield the non-empty documents of ``data.source``, in an order that depends on the corpus alone.

    Raises ConfigError, with file and line, for a document that cannot be read. Empty documents raise it unless
    ``data.skip_empty`` is set.
    """
    texts, parquet, hub = _read_texts, _read_parquet, _read_hub
    readers = {"sotu": texts, "text": texts, "jsonl": _read_jsonl, "parquet": parquet, "hub": hub, "chat": _read_chat}
    for document in readers[config.source](config):
        text = document.text.strip()
        if text:
            yield document._replace(text=text)
        elif not config.skip_empty:
            problem = "a conversation without an answer" if config.source == "chat" else "an empty document"
            raise ConfigError(f"{document.location}: {problem}; remove it, or set data.skip_empty=true")


def files(config: DataConfig) -> list[Path]:
    """Return the sorted files of the corpus. Raises ConfigError if the package that contains them is missing.

    The configuration checks (config.checks) have made sure that ``data.path`` matches a file.
    """
    if config.source == "sotu":
        return sorted((sources.package_directory(config, "sotu", "sotu") / "data" / "speeches").glob("*.txt"))
    assert config.path
    return sorted(set(matching_files(config.path)))  # a/**/** matches a file several times


def size(config: DataConfig) -> int | None:
    """Return the size of the corpus in bytes, or None for a hub dataset, whose size is not known in advance."""
    return None if config.source == "hub" else sum(path.stat().st_size for path in files(config))


def identity(config: DataConfig) -> str:
    """Return the facts that identify a corpus (``sources.facts``), and the settings with which documents are read."""
    return repr((config.source, config.column, config.skip_empty, *sources.facts(config, files)))


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is in the validation split."""
    return sources.is_held_out(text.encode(), fraction)


def _open_content(path: Path, file: io.BufferedReader) -> io.BufferedIOBase:
    """Return a reader of the decompressed content if the file is .gz or .zst, otherwise ``file``."""
    if path.suffix not in (".gz", ".zst"):
        return file
    if not file.peek(1):
        raise EOFError("the file is empty")
    return gzip.open(file) if path.suffix == ".gz" else io.BufferedReader(_ChunkReader(_decompress_zstd(file)))


def _decompress_zstd(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the content of all zstandard frames. Raises EOFError for a truncated one, OSError for an invalid one."""
    import zstandard

    frame, rest = None, b""
    try:
        while content := rest or file.read(_COMPRESSED_BYTES):
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(content)
            rest = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None
    if frame is None or not frame.eof:
        raise EOFError("the file is truncated")


class _ChunkReader(io.RawIOBase):
    """A readable file over an iterator of byte chunks."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks, self.current = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.current:
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.current = memoryview(chunk)
        size = min(len(buffer), len(self.current))
        buffer[:size], self.current = self.current[:size], self.current[size:]
        return size


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({one_line(error)}); download or create the file again")


def _files_with_offsets(config: DataConfig) -> Iterator[tuple[Path, int]]:
    """Yield each file with the total bytes of the files before it."""
    offset = 0
    for path in files(config):
        yield path, offset
        offset += path.stat().st_size


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each line with the number of bytes of the file read so far."""
    try:
        with open(path, "rb") as file, _open_content(path, file) as content:
            for line in content:
                yield line, file.tell()
    except (OSError, EOFError, zlib.error) as error:  # truncated, damaged, or not compressed
        raise _unreadable(path, error) from None


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv") from None


def _read_texts(config: DataConfig) -> Iterator[Document]:
    for path, offset in _files_with_offsets(config):
        lines = [_decode(line, f"{path}:{number}") for number, (line, _) in enumerate(_lines(path), 1)]
        yield Document("".join(lines).replace("\r\n", "\n"), str(path), offset + path.stat().st_size)


def _read_jsonl(config: DataConfig) -> Iterator[Document]:
    for row, location, bytes_read in _rows(config):
        yield Document(_text_of(row, config.column, location), location, bytes_read)


def _read_chat(config: DataConfig) -> Iterator[Document]:
    for row, location, bytes_read in _rows(config):
        conversation = conversations.parse(row, location)
        trained = conversation.messages if config.train_on == "all" else conversation.answers()
        text = conversation.to_text() if trained else ""
        _check_encodable(text, location, "the conversation")
        yield Document(text, location, bytes_read)


def _rows(config: DataConfig) -> Iterator[tuple[Any, str, int]]:
    """Yield the rows of files of JSON lines, each with its location and the position of its end."""
    for path, offset in _files_with_offsets(config):
        for number, (line, bytes_read) in enumerate(_lines(path), 1):
            location = f"{path}:{number}"
            text = _decode(line, location)
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # also for very long numbers and deeply nested lists
                raise ConfigError(f"{location}: invalid JSON ({one_line(error)}); fix or remove the line") from None
            yield row, location, offset + bytes_read


def _read_parquet(config: DataConfig) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    for path, offset in _files_with_offsets(config):
        number = 0
        try:
            with ParquetFile(path) as file:
                bytes_per_row = path.stat().st_size / max(1, file.metadata.num_rows)
                names = file.schema_arrow.names
                columns = [config.column] if config.column in names else names
                for batch in file.iter_batches(batch_size=1000, columns=columns):
                    for row in batch.to_pylist():
                        location = f"{path}: row {number}"
                        number += 1
                        bytes_read = offset + int(bytes_per_row * number)
                        yield Document(_text_of(row, config.column, location), location, bytes_read)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from None


def _read_hub(config: DataConfig) -> Iterator[Document]:
    for row, location in sources.hub_rows(config):
        yield Document(_text_of(row, config.column, location), location)


def _text_of(row, column: str, location: str) -> str:
    """Return the text of a row. Raises ConfigError if the column has no text or UTF-8 cannot encode the text."""
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        there = ", ".join(key for key, value in row.items() if isinstance(value, str)) if isinstance(row, dict) else ""
        raise ConfigError(
            f"{location}: no text in data.column={column}; set it to a column with text (here: {there or 'none'})"
        )
    _check_encodable(row[column], location, f"data.column={column}")
    return row[column]


def _check_encodable(text: str, location: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" in JSON
        raise ConfigError(
            f"{location}: character {error.start} of {name} is half of a surrogate pair; fix or remove the line"
        ) from None
