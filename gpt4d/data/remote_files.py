"""Files at URLs of fsspec, which are read in spite of failures of servers and networks that pass."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import responses
from typing import Any, TypeVar

from gpt4d.data.checks import check_remote
from gpt4d.runtime.errors import Unavailable, one_line, warn

T = TypeVar("T")
_abandoned = threading.Event()  # set by ``abandon``, which replaces it for later reads
_TIMEOUT_S = 60.0  # for a web server that sends nothing
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # between two attempts; each pause is twice as long as the one before
_SLOW_S = 5.0  # a wait of this length is reported
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
_OF_NETWORKS = ("aiohttp", "botocore", "gcsfs")  # packages whose errors are no OSErrors
_NO_RANGES = (400, 405, 416, 501)  # answers of web servers that cannot send a part of a file


def is_http(url: str) -> bool:
    """Return whether a URL is of a web server."""
    return url.startswith(("http://", "https://"))


def listed(pattern: str, retry_s: float) -> tuple[Any, dict[str, dict]]:
    """Return the file system of a URL, and the files that its glob matches, with their facts by path.

    Raises ConfigError if the package of the file system is not installed, Unavailable if the server does not answer
    for ``retry_s``, and any exception of the file system.
    """

    def entries() -> tuple[Any, dict[str, dict]]:
        system, path = _file_system(pattern)
        if not is_http(pattern) or "*" in path or "[" in path:
            return system, system.glob(path, detail=True)
        try:
            return system, {path: system.info(path)}
        except FileNotFoundError as error:  # of any answer but a file
            if error.__cause__ is None or _status(error.__cause__) in (404, 410):
                return system, {}
            raise error.__cause__ from None

    with report_slow(f"{pattern}: waiting for the list of files"):
        return patiently(entries, pattern, retry_s)


@contextmanager
def report_slow(text: str) -> Iterator[None]:
    """Print ``text`` if the body takes longer than a few seconds."""
    timer = threading.Timer(_SLOW_S, print, [text], {"flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abandon() -> None:
    """End all repetitions of failed reads, because a run ends and needs no more data. Any thread may call this."""
    global _abandoned
    _abandoned.set()
    _abandoned = threading.Event()


def patiently(work: Callable[[], T], url: str, retry_s: float) -> T:
    """Return ``work()``, which is repeated for ``retry_s`` while it fails for a reason that may pass.

    Raises Unavailable, which names the ``url``, after this time, and any other exception of ``work``.
    """
    began, since, pause = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S"), _PAUSE_S
    abandoned = _abandoned
    while True:
        try:
            return work()
        except Exception as error:  # each file system raises its own types
            if not _may_pass(error):
                raise
            left = began + retry_s - time.monotonic()
            if left <= 0 or abandoned.is_set():
                raise Unavailable(
                    f"{url}: {reason(error)}, since {since} (data.retry_s={retry_s:g}); check the server and the "
                    "network, and start the same command again"
                ) from None
            if pause == _PAUSE_S:
                warn(f"{url}: {reason(error)}; trying again for up to {left:.0f} s (data.retry_s)")
            abandoned.wait(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _may_pass(error: Exception) -> bool:
    """Return whether a later attempt may succeed: after a lost connection, a timeout, or a server's own error."""
    status = _status(error)
    if status is not None:  # 0 for an endless redirection
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, _LASTING) or "Credentials" in type(error).__name__:
        return False
    return isinstance(error, OSError | EOFError) or type(error).__module__.partition(".")[0] in _OF_NETWORKS


def _status(error: object) -> int | None:
    """Return the status of a web server's answer in an exception of aiohttp or gcsfs; None without an answer."""
    return next((code for name in ("status", "code") if isinstance(code := getattr(error, name, None), int)), None)


def reason(error: Exception) -> str:
    """Return a description of the failure."""
    if "Redirect" in type(error).__name__:
        return "the server redirects without an end"
    if status := _status(error):
        return f"the server answers {status} {responses.get(status, '')}".rstrip()
    if isinstance(error, TimeoutError):
        return f"the server has sent nothing for {_TIMEOUT_S:g} s"
    return one_line(error)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Raises ConfigError if its package is not installed."""
    from fsspec.core import url_to_fs

    check_remote(url)
    if not is_http(url):
        return url_to_fs(url)
    import aiohttp

    # By default, a file has 300 s.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
    return url_to_fs(url, client_kwargs={"timeout": timeout})


class RemoteFile(io.RawIOBase):
    """A file at a URL. Only files of web servers, which may lack ranges, are not seekable.

    A read that fails is repeated from its offset, for up to ``retry_s``. Raises Unavailable after this time, and
    OSError for any other error.

    Args:
        url: the URL.
        size: bytes of the file; 0 if unknown. An answer that ends before is a failure.
        retry_s: seconds for which a failed read is repeated.
    """

    def __init__(self, url: str, size: int, retry_s: float):
        self._url, self._size, self._retry_s, self._streamed = url, size, retry_s, is_http(url)
        self._file: Any = None  # opened at ``_offset``; None after a failure
        self._offset, self._ended, self._ranges = 0, False, True
        self._version: str | None = None
        self._patiently(self._opened)

    def _patiently(self, work: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return work()
            except Exception:
                self._discard()
                raise

        try:
            return patiently(attempt, self._url, self._retry_s)
        except (OSError, Unavailable):
            raise
        except Exception as error:
            raise OSError(reason(error)) from None

    def _discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> Any:
        """Return the file of fsspec, which is opened again after a failure."""
        if self._file is None:
            system, path = _file_system(self._url)
            if self._streamed:
                self._file = self._answer(system, path)
            else:
                self._file = system.open(path, "rb")
                self._file.seek(self._offset)
        return self._file

    def _answer(self, system: Any, path: str) -> Any:
        """Return the answer of a web server from the offset on."""

        def asked(**headers: str) -> Any:
            headers |= {"Accept-Encoding": "identity"}  # offsets count bytes of the file
            return system.open(path, "rb", block_size=0, size=1, headers=headers)  # without another request for a size

        file = None
        if self._offset and self._ranges:
            try:
                file = asked(Range=f"bytes={self._offset}-")
            except Exception as error:
                if _status(error) not in _NO_RANGES:
                    raise
                self._ranges = False
        file = self._file = file or asked()
        headers = file.r.headers
        version = headers.get("ETag") or headers.get("Last-Modified")
        if self._version not in (None, version):
            raise ValueError("the file has changed on the server while it was read")
        self._version = version
        left = 0 if file.r.status == 206 else self._offset
        while left:
            skipped = len(file.read(min(left, 1 << 20)))
            if not skipped:
                raise EOFError(f"the answer has ended {left:,} bytes before the offset")
            left -= skipped
        return file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._streamed

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = self._patiently(lambda: self._opened().seek(offset, whence))
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        def read() -> bytes:
            content = self._opened().read(len(buffer))
            if not content and self._offset < self._size:
                raise EOFError(f"the answer has ended after {self._offset:,} of {self._size:,} bytes")
            return content

        # A streamed file warns of reads after its end.
        content = b"" if self._ended else self._patiently(read)
        self._ended = self._streamed and not content
        self._offset += len(content)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._discard()
        super().close()
