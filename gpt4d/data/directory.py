"""Directories of prepared data. One job at a time writes a directory, which gets its final name when it is complete."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt4d.config import DataConfig
from gpt4d.runtime import activity
from gpt4d.runtime.files import sync
from gpt4d.runtime.writing import file_error, warn


def in_cache(config: DataConfig, identity: str) -> Path:
    """Return the directory in ``data.cache_dir`` for the prepared data with this identity, a hash."""
    return Path(os.path.expanduser(config.cache_dir)) / f"{config.name}-{identity[:16]}"


def write_once(out: Path, write: Callable[[Path], None], on_progress: Callable[[str], None]) -> bool:
    """Create the directory ``out`` and return True; or return False if it exists.

    ``write`` fills the directory ``out``.partial, which may have files of an interrupted job, and which is renamed to
    ``out`` when ``write`` returns. While this job waits for another one, it calls ``on_progress`` with a line of text.
    Raises ConfigError for files that cannot be read or written.
    """
    try:
        if out.exists():
            return False
        partial = out.with_name(out.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        # Encoding, downloads and waits for another job have no time limit. ``on_progress`` reports the state.
        with activity.unlimited(), _lock(partial, on_progress):
            if out.exists():  # another job may have written it while this one waited
                return False
            write(partial)
            os.rename(partial, out)
            sync(out.parent)
            return True
    except OSError as error:
        raise file_error(out, error) from None


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
