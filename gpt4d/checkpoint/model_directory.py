"""Directories with a model of transformers or diffusers: a family's adapter, JSON files, and their creation."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt4d.config import ConfigError
from gpt4d.model.family import Family, HuggingFaceAdapter
from gpt4d.runtime.files import file_error, sync


def adapter_of(family: Family) -> HuggingFaceAdapter:
    """Return the family's adapter. Raises ConfigError if the family has no adapter."""
    if family.adapter is None:
        raise ConfigError(
            f"model family {family.name}: transformers and diffusers have no such models; train with gpt4d itself"
        )
    return family.hugging_face()


def read_json(source: str, path: Path) -> dict[str, Any]:
    """Return a JSON object in a file. Raises ConfigError for a damaged file; ``source`` begins its message."""
    if path.exists() and not path.is_file():  # Opening a pipe blocks.
        raise ConfigError(f"{source}: {path.name} is not a regular file; use another copy of the model")
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source}: no readable {path.name} ({error}); use another copy of the model") from None


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to ``path`` on success. Raises ConfigError if ``path`` exists."""
    try:
        if path.exists():
            kind = "a run or an import" if (path / "checkpoints").exists() else "exists"
            raise ConfigError(f"out={path}: {kind}; choose another name or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            directory = Path(temporary) / path.name
            directory.mkdir()
            yield directory
            for file in directory.rglob("*"):
                sync(file)
            sync(directory)
            directory.rename(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(f"out={path}: {file_error(path, error)}") from None
