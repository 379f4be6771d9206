"""Directories with a model of transformers or diffusers: a family's adapter, and the creation of such a directory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt4d.config import ConfigError
from gpt4d.files import sync
from gpt4d.model.family import Family, HuggingFaceAdapter
from gpt4d.writing import file_error


def adapter_of(family: Family) -> HuggingFaceAdapter:
    """Return the family's adapter. Raises ConfigError if the family has no adapter."""
    if family.adapter is None:
        raise ConfigError(
            f"model family {family.name}: transformers and diffusers have no such models; train with gpt4d itself"
        )
    return family.hugging_face()


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
