"""The files of a corpus, local or at URLs of fsspec, and their decompressed content."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gpt4d.config import ConfigError, is_remote, matching_files
from gpt4d.data.remote_files import RemoteFile, is_http, listed, reason

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)  # truncated, damaged, or not compressed
_COMPRESSED_BYTES = 1 << 14  # compressed bytes per call; at the highest ratio, the result has half a gigabyte
_PIECE_BYTES = 1 << 20  # decompressed bytes per call of lzma and bz2
_REMOTE_BYTES = 1 << 20  # bytes per read of a remote file
# Keys under which file systems store a checksum of the content.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c")


class CorpusFile(NamedTuple):
    """A file of a corpus."""

    location: str  # path or URL
    size: int  # bytes, 0 if a server does not state them
    tag: str = ""  # checksum of the content by a remote file system; empty if unknown
    retry_s: float = 0.0  # seconds for which a failed read of a remote file is repeated

    @classmethod
    def local(cls, path: str | Path) -> "CorpusFile":
        return cls(str(path), os.stat(path).st_size)

    @property
    def path(self) -> str:
        """The absolute path, which for a URL begins with its protocol."""
        if is_remote(self.location):
            return "/" + self.location.replace("://", "/", 1)
        return os.path.abspath(self.location)

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of the name in lower case, such as .jsonl and .gz; without the query of a URL."""
        name = urlsplit(self.location).path if is_http(self.location) else self.location
        return [suffix.lower() for suffix in PurePosixPath(name).suffixes]

    @property
    def is_compressed(self) -> bool:
        return self.suffixes[-1:] != [] and self.suffixes[-1] in _DECOMPRESSED

    def open(self) -> io.BufferedReader:
        """Open the file as it is stored, for reading. Raises OSError, and Unavailable for a server that fails."""
        if not is_remote(self.location):
            return open(self.location, "rb")
        return io.BufferedReader(RemoteFile(self.location, self.size, self.retry_s), _REMOTE_BYTES)

    def content(self, file: io.BufferedReader) -> io.BufferedIOBase:
        """Return a reader of the decompressed content of the opened ``file``. Raises EOFError if it is empty."""
        if not self.is_compressed:
            return file
        if not file.peek(1):
            raise EOFError("the file is empty")
        return _DECOMPRESSED[self.suffixes[-1]](file)

    def __str__(self) -> str:
        return self.location


def corpus_files(patterns: Iterable[str], retry_s: float = 0.0) -> list[CorpusFile]:
    """Return the files that globs match, in the order of their paths, each once. ``retry_s``: as for ``CorpusFile``.

    Raises ConfigError for a pattern at a URL that matches no file, or that cannot be listed; Unavailable if its server
    does not answer for ``retry_s``. The configuration checks (gpt4d.data.checks) have made sure that local
    patterns match files.
    """
    found: dict[str, CorpusFile] = {}
    for pattern in patterns:
        files = (
            _remote_files(pattern, retry_s) if is_remote(pattern) else map(CorpusFile.local, matching_files(pattern))
        )
        found |= {file.location: file for file in files}  # a/**/** matches a file several times
    return sorted(found.values(), key=lambda file: PurePosixPath(file.location).parts)


def _remote_files(pattern: str, retry_s: float) -> Iterator[CorpusFile]:
    try:
        system, entries = listed(pattern, retry_s)
    except ConfigError:
        raise
    except Exception as error:  # each file system raises its own types
        raise ConfigError(
            f"data.path={pattern}: cannot be listed ({reason(error)}); check the address, the network and the "
            "credentials"
        ) from None
    files = {name: entry for name, entry in entries.items() if entry.get("type", "file") == "file"}
    if not files:
        raise ConfigError(f"data.path={pattern}: matches no file; use a URL or glob that exists")
    for name, entry in files.items():
        tag = next((str(entry[key]) for key in _TAGS if entry.get(key)), "")
        yield CorpusFile(system.unstrip_protocol(name), entry.get("size") or 0, tag, retry_s)


def _decompress_zstd(file: io.BufferedReader) -> Iterator[bytes]:
    import zstandard

    try:
        yield from _frames(
            file, zstandard.ZstdDecompressor().decompressobj, lambda frame, content: [frame.decompress(content)]
        )
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None


def _in_pieces(frame: Any, content: bytes) -> Iterator[bytes]:
    """Yield the decompressed ``content`` in pieces of limited size. ``frame``: a decompressor of lzma or bz2."""
    yield frame.decompress(content, _PIECE_BYTES)
    while not (frame.eof or frame.needs_input):
        yield frame.decompress(b"", _PIECE_BYTES)


def _frames(
    file: io.BufferedReader, decompressor: Callable[[], Any], decompress: Callable[[Any, bytes], Iterable[bytes]]
) -> Iterator[bytes]:
    """Yield the content of all frames of a compressed file. Zeros between and after frames are padding.

    Raises EOFError for a truncated frame, and an error of the decompressor for anything else behind a frame.
    """
    frame, rest = None, b""
    while content := rest or file.read(_COMPRESSED_BYTES):
        rest = b""
        if frame is None or frame.eof:
            content = content.lstrip(b"\0") if frame else content
            if not content:
                continue
            frame = decompressor()
        yield from decompress(frame, content)
        rest = frame.unused_data if frame.eof else b""
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


def _reader(chunks: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_ChunkReader(chunks))


_DECOMPRESSED: dict[str, Callable[[io.BufferedReader], Any]] = {
    ".gz": gzip.open,
    ".xz": lambda file: _reader(_frames(file, lzma.LZMADecompressor, _in_pieces)),
    ".bz2": lambda file: _reader(_frames(file, bz2.BZ2Decompressor, _in_pieces)),
    ".zst": lambda file: _reader(_decompress_zstd(file)),
}
