"""The default of ``model.vocab_size``: the vocabulary of the model that a run continues, or the size of its tokenizer.

``${tokenizer_size:}`` in settings stands for this number. Every composed configuration contains the number itself.
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gpt4d.config.data_checks import HEADER, blend_paths, is_megatron, newest_file, tokenizer_file
from gpt4d.config.fields import LARGEST_SIZE, ConfigError
from gpt4d.config.schema import DataConfig

TRAINED = 8192  # size of a tokenizer that is trained on the corpus, unless data.tokenizer_vocab is set
_size_of: list[Callable[[str], int]] = []


def register_tokenizer_size(size: Callable[[str], int]) -> None:
    """Register the function that returns the size of a tokenizer by its name, a value of ``data.tokenizer``."""
    _size_of[:] = [size]


def register_resolver() -> None:
    """Let ``${tokenizer_size:}`` in YAML files stand for the default of ``model.vocab_size``."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("tokenizer_size", _default_vocabulary, replace=True)


def tokenizer_size(data: DataConfig, download: bool = True) -> int | None:
    """Return the number of token ids of the tokenizer of text data; None if a run trains it, or the data have none.

    ``download=False``: also None for a name on the hub. Missing files have no tokenizer, since ``check_data`` reports
    them. Raises ConfigError for a tokenizer that cannot be used.
    """
    for path in _prepared(data):
        if not is_megatron(path):
            return _stored(Path(os.path.expanduser(path)) / HEADER, "vocabulary")
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
    return _size_of[0](name)


def _default_vocabulary(*, _root_: Any) -> int:
    """Return the vocabulary of the checkpoint with which the run begins; otherwise the size of its tokenizer.

    Raises ConfigError if the data have no tokenizer.
    """
    from omegaconf import OmegaConf

    given, resume = _root_.data, _root_.checkpoint.resume
    resumed = {"auto": _root_.run.dir, "never": None}.get(resume, resume)
    for directory in filter(None, (resumed, _root_.checkpoint.init)):
        file = newest_file(Path(os.path.expanduser(directory)), "meta.json")
        if size := _stored(file, "model", "vocab_size"):
            return size
    path, blend = (OmegaConf.to_container(each) if OmegaConf.is_config(each) else each
                   for each in (given.path, given.blend))  # fmt: skip
    data = DataConfig(source=given.source, path=path, blend=blend, tokenizer=given.tokenizer, tokenizer_vocab=None)
    if size := tokenizer_size(data):
        return size
    if data.tokenizer is None and any(map(is_megatron, _prepared(data))):
        raise ConfigError(
            "data.tokenizer=null: Megatron's files have no tokenizer, whose size is the default of model.vocab_size; "
            "set data.tokenizer to the one that made them, or set model.vocab_size"
        )
    if OmegaConf.is_interpolation(given, "tokenizer_vocab") or given.tokenizer_vocab is None:  # from model.vocab_size
        return TRAINED
    return max(1, min(given.tokenizer_vocab, LARGEST_SIZE))  # a value outside is an error of data.tokenizer_vocab


def _prepared(data: DataConfig) -> list[str]:
    """Return the token directories and prefixes of Megatron's files that a run reads; empty for other data."""
    if data.source == "blend":
        return blend_paths(data.blend)
    return [data.path] if data.source in ("tokens", "megatron") and isinstance(data.path, str) else []


def _stored(file: Path, *keys: str) -> int | None:
    """Return a number in a JSON file; None if the file or the number is missing or invalid."""
    try:
        value: Any = json.loads(file.read_bytes())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if type(value) is int and value > 0 else None
