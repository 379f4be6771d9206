"""Values of settings that follow from files: the vocabulary of a checkpoint or of a tokenizer.

A composed configuration depends on configs, arguments and environment alone, and leaves these values open.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpt4d.config import (
    HEADER,
    Config,
    ConfigError,
    DataConfig,
    blend_paths,
    is_megatron,
    newest_file,
    tokenizer_file,
)
from gpt4d.config.fields import LARGEST_SIZE
from gpt4d.data import tokenizers, transformers_tokenizer

TRAINED = 8192  # size of a tokenizer that is trained on the corpus, unless data.tokenizer_vocab is set


class Completion(NamedTuple):
    """A configuration without open values."""

    config: Config
    origins: Mapping[str, str]  # for each value that was open, the file or the setting from which it follows


def completion(config: Config) -> Completion:
    """Return the configuration with the values that follow from files, and their origins.

    ``model.vocab_size=null`` becomes the vocabulary of the checkpoint with which the run begins, otherwise the size of
    the tokenizer of its data. Raises ConfigError if the data have no tokenizer.
    """
    model: Any = config.model
    if getattr(model, "vocab_size", 0) is not None:  # a model of images has no vocabulary
        return Completion(config, {})
    size, origin = _vocabulary(config)
    data = config.data
    if data.tokenizer_vocab is None:
        data = replace(data, tokenizer_vocab=size)
    return Completion(replace(config, model=replace(model, vocab_size=size), data=data), {"model.vocab_size": origin})


def complete(config: Config) -> Config:
    """Return the configuration of ``completion``."""
    return completion(config).config


def begin_of_text(config: Config) -> bool | None:
    """Return ``data.begin_of_text``. If it is null, a run continues as the checkpoint with which it begins.

    None: as the tokenizer adds tokens, for a new run or one that begins with an imported model.
    """
    if config.data.begin_of_text is not None:
        return config.data.begin_of_text
    for file in _checkpoints(config):
        identity = _stored(file, "identity")
        if isinstance(identity, dict):
            is_run = bool(_stored(file, "grids"))  # an import has none
            return True if identity.get(tokenizers.BEGIN) else False if is_run else None
    return None


def tokenizer_size(data: DataConfig, download: bool = True) -> int | None:
    """Return the number of token ids of the tokenizer of text data; None if a run trains it, or the data have none.

    ``download=False``: also None for a name on the hub. Missing files have no tokenizer, since ``check_data`` reports
    them. Raises ConfigError for a tokenizer that cannot be used.
    """
    for path in _prepared(data):
        if not is_megatron(path):
            return _stored_size(Path(os.path.expanduser(path)) / HEADER, "vocabulary")
    name = data.tokenizer
    if not name:
        return None
    file = tokenizer_file(name)
    if file.is_file():
        state = file.stat()
        return _named_size(name, (str(file), state.st_mtime_ns, state.st_size))
    return _named_size(name, None) if name == "gpt2" or (download and not name.endswith(".json")) else None


@cache
def _named_size(name: str, file: tuple[str, int, int] | None) -> int:
    """Return the size of a tokenizer. ``file``: path, time of change and bytes of its file; None without a file."""
    files = transformers_tokenizer.files_of("data.tokenizer", name)
    return tokenizers.vocabulary(tokenizers.parse(files, name))


def _vocabulary(config: Config) -> tuple[int, str]:
    """Return the number of token ids of a run's model, and its origin."""
    data = config.data
    for file in _checkpoints(config):
        if size := _stored_size(file, "model", "vocab_size"):
            return size, f"the checkpoint {file.parent}"
    if size := tokenizer_size(data):
        return size, f"data.tokenizer={data.tokenizer}" if data.tokenizer else f"the tokenizer of data={data.name}"
    if data.tokenizer is None and any(map(is_megatron, _prepared(data))):
        raise ConfigError(
            "data.tokenizer=null: Megatron's files have no tokenizer, whose size is the default of model.vocab_size; "
            "set data.tokenizer to the one that made them, or set model.vocab_size"
        )
    if data.tokenizer_vocab is None:
        return TRAINED, "the default of data.tokenizer_vocab"
    return max(1, min(data.tokenizer_vocab, LARGEST_SIZE)), "data.tokenizer_vocab"  # its limits are checked later


def _checkpoints(config: Config) -> list[Path]:
    """Return the metadata of the checkpoint that a run resumes, and of the one that has its initial weights."""
    resume = config.checkpoint.resume
    resumed = {"auto": config.run.dir, "never": None}.get(resume, resume)
    directories = filter(None, (resumed, config.checkpoint.init))
    return [newest_file(Path(os.path.expanduser(directory)), "meta.json") for directory in directories]


def _prepared(data: DataConfig) -> list[str]:
    """Return the token directories and prefixes of Megatron's files that a run reads; empty for other data."""
    if data.source == "blend":
        return blend_paths(data.blend)
    return [data.path] if data.source in ("tokens", "megatron") and isinstance(data.path, str) else []


def _stored(file: Path, *keys: str) -> Any:
    """Return a value in a JSON file; None if the file or the value is missing."""
    try:
        value: Any = json.loads(file.read_bytes())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value


def _stored_size(file: Path, *keys: str) -> int | None:
    """Return a size in a JSON file; None if the file or the size is missing or invalid."""
    size = _stored(file, *keys)
    return size if type(size) is int and size > 0 else None
