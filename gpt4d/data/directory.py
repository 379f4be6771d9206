"""Directories of prepared data. One job at a time writes a directory, which gets its final name when it is complete."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt4d.config import HEADER, DataConfig
from gpt4d.runtime import activity
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import required_file, sync, write_file

SPLITS = ("train", "validation")
REPORT_INTERVAL_S = 2.0


def in_cache(config: DataConfig, identity: str) -> Path:
    """Return the directory in ``data.cache_dir`` for the prepared data with this identity, a hash."""
    return Path(os.path.expanduser(config.cache_dir)) / f"{config.name}-{identity[:16]}"


def printer(location: object) -> Callable[[str], None]:
    """Return a function that prints a line of text about ``location``."""
    return lambda text: print(f"{location}: {text}", flush=True)


class ReportTimer:
    """Times of reports about a preparation."""

    def __init__(self) -> None:
        self._next = time.monotonic() + REPORT_INTERVAL_S

    def is_due(self) -> bool:
        """Return True once per report interval."""
        due = time.monotonic() >= self._next
        self._next += due * REPORT_INTERVAL_S
        return due


def clear(directory: Path, kept: Container[str] = ()) -> None:
    """Delete the files of an interrupted preparation, except those with the names ``kept``."""
    for path in directory.iterdir():
        if path.name not in kept:
            path.unlink()


def write_once(out: Path, write: Callable[[Path], dict], on_progress: Callable[[str], None]) -> bool:
    """Create the directory ``out`` and return True; or return False if it exists.

    ``write`` fills the directory ``out``.partial, which may have files of an interrupted job, and returns the content
    of its header, which is written last. The directory is then renamed to ``out``. While this job waits for another
    one, it calls ``on_progress`` with a line of text. Raises ConfigError for files that cannot be read or written.
    """
    with required_file(out):
        if out.exists():
            return False
        partial = out.with_name(out.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        # Encoding, downloads and waits for another job have no time limit. ``on_progress`` reports the state.
        with activity.unlimited(), _lock(partial, on_progress):
            if out.exists():  # another job may have written it while this one waited
                return False
            header = write(partial)
            write_file(partial / HEADER, json.dumps(header, indent=1).encode())
            sync(partial)
            os.rename(partial, out)
            sync(out.parent)
    return True


@contextmanager
def _lock(directory: Path, on_progress: Callable[[str], None]) -> Iterator[None]:
    """Let one job at a time prepare ``directory``. The lock belongs to the directory and survives its renaming.

    On a file system without locks, every job acquires it and prints a warning, as for the lock of a run.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(f"waiting for another job that prepares {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            warn(f"{directory} cannot be locked ({error.strerror}); start no other job that prepares the same data")
        yield
    finally:
        os.close(descriptor)
