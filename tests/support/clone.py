"""Copies of the repository."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.environment import REPOSITORY

_COPIED = ("benchmarks", "configs", "docs", "examples", "gpt4d", "scripts", "tests")


@contextmanager
def copied_repository() -> Iterator[Path]:
    """Yield a copy of the repository that ends with the body."""
    with tempfile.TemporaryDirectory(prefix="copy-") as directory:
        copy = Path(directory) / "gpt4d"
        copy.mkdir()
        for entry in REPOSITORY.iterdir():
            if entry.name in _COPIED:
                shutil.copytree(entry, copy / entry.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            elif entry.is_file() and not entry.is_symlink():
                shutil.copy(entry, copy)
        yield copy
