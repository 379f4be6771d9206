"""Checks of the settings of the data. No torch here."""

import glob
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt4d.config import (
    HEADER,
    HELD_OUT,
    PREPARED,
    BlendStage,
    ConfigError,
    DataConfig,
    blend_paths,
    blend_stages,
    file_source,
    is_megatron,
    is_remote,
    matching_files,
    patterns,
    tokenizer_file,
)
from gpt4d.config.schema import IMAGE_SOURCES, TEXT_SOURCES

_SOURCES = {"text": TEXT_SOURCES, "images": IMAGE_SOURCES}
_DATA = {"text": "data=sotu, data=text or data=jsonl", "images": "data=blue_marble, data=pictures or data=cifar10"}
_PATHS = {  # an example of data.path for each source that needs one
    "hub": "the name of a dataset",
    "tokens": "the directory that prepare wrote to out=DIR",
    "megatron": "the prefix of Megatron's files, such as data.path=/data/my_text_document",
    "text": 'a glob of files, such as data.path="books/*.txt"',
    "jsonl": 'a glob of files, such as data.path="crawl/*.jsonl.zst"',
    "parquet": 'a glob of files, such as data.path="crawl/*.parquet"',
    "csv": 'a glob of files, such as data.path="crawl/*.csv.gz"',
    "arrow": 'a glob of files, such as data.path="crawl/*.arrow"',
    "files": 'globs of files, such as data.path="[books/*.txt, crawl/*.jsonl.zst]"',
    "chat": 'a glob of files, such as data.path="sft/*.jsonl"',
    "pictures": 'a folder or a glob of files, such as data.path="photos/*.jpg"',
}


def check_data(data: DataConfig, model: str) -> None:
    """Check the ``data`` settings of a run that trains the model named ``model`` on text.

    Raises ConfigError for an invalid value, or if ``data.path`` or ``data.tokenizer`` names no existing file.
    """
    if data.tokenizer_vocab is None:
        raise ConfigError("data.tokenizer_vocab=null: the model has no vocabulary; set the tokenizer's size")
    _check_source(data, "text", model)
    if data.source == "blend":
        _check_blend(data.blend)
    if data.stream and not data.tokenizer and data.source not in PREPARED:
        raise ConfigError(
            "data.tokenizer=null: data.stream=true trains no tokenizer, which reads the complete text first; use "
            "gpt2, a run, a file or a hub name, or leave out data.stream"
        )
    if data.stream and data.workers > 1:
        raise ConfigError(f"data.workers={data.workers}: one thread reads with data.stream=true; set it to 1 or 0")
    if data.source == "chat" and not data.tokenizer:
        raise ConfigError(
            "data.tokenizer=null: conversations need the tokenizer of the model that is trained on them; set it to the "
            "model's run or directory, or its hub name"
        )
    if data.chat_template and not os.path.isfile(os.path.expanduser(data.chat_template)):
        raise ConfigError(f"data.chat_template={data.chat_template}: no such file; use an existing file")
    if data.tokenizer and data.tokenizer.endswith(".json") and not tokenizer_file(data.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer={data.tokenizer}: no such file; use gpt2, a hub name or an existing file")
    _check_validation_sets(data.validation)


def _check_validation_sets(sets: Any) -> None:
    """Raise ConfigError unless ``data.validation`` maps names to token directories and globs of existing files."""
    if sets is None:
        return
    if not isinstance(sets, dict) or not sets or not all(isinstance(path, str) and path for path in sets.values()):
        raise ConfigError(
            f"data.validation={sets}: not a map of names to token directories, prefixes or globs of files; "
            "use 'data.validation={books: tokens/books, code: \"code/*.py\"}'"
        )
    for name, path in sets.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"data.validation={sets}: {name!r} is not a name of a validation set; use letters, digits and "
                "underscores"
            )
        if name == HELD_OUT:
            raise ConfigError(
                f"data.validation.{name}={path}: {name} is the name of the documents that the run holds out; use "
                "another name"
            )
        if os.path.isdir(os.path.expanduser(path)):
            if not _has_tokens(path):
                raise ConfigError(
                    f"data.validation.{name}={path}: a directory without token files; use a directory that python -m "
                    "gpt4d.data.prepare wrote, or a glob of files such as 'books/*.txt'"
                )
        elif not is_megatron(path) and not any(matching_files(path)):
            raise ConfigError(f"data.validation.{name}={path}: {_no_match(path, folders=False)}")


def check_image_data(data: DataConfig, model: str) -> None:
    """Check the ``data`` settings of a run that trains the model named ``model`` on images.

    Raises ConfigError for an invalid value, or if ``data.path`` names no existing file.
    """
    _check_source(data, "images", model)


def _check_source(data: DataConfig, kind: str, model: str) -> None:
    """Check the settings that text and images have in common. ``kind`` is ``text`` or ``images``."""
    if not data.name or {"/", "\0"} & {*data.name} or data.name in (".", ".."):
        raise ConfigError(f"data.name={data.name!r}: it names a directory in data.cache_dir; use a name without /")
    (other,) = _SOURCES.keys() - {kind}
    if data.source in _SOURCES[other] and data.source not in _SOURCES[kind]:
        raise ConfigError(f"data.source={data.source}: {other}, but model={model} trains on {kind}; use {_DATA[kind]}")
    if data.source not in _PATHS:
        return
    if not data.path:
        raise ConfigError(f"data.path=null: data.source={data.source} needs a path; set {_PATHS[data.source]}")
    if data.source in ("hub", "tokens", "megatron"):
        _check_one_path(data)
    else:
        _check_patterns(data, folders=kind == "images")


def _check_one_path(data: DataConfig) -> None:
    if not isinstance(data.path, str):
        raise ConfigError(f"data.path={data.path}: data.source={data.source} reads one path; set {_PATHS[data.source]}")
    if data.source == "megatron" and not is_megatron(data.path):
        remedy = re.sub(r"\.(bin|idx)$", "", data.path)
        remedy = f"set data.path={remedy}" if is_megatron(remedy) else f"set {_PATHS['megatron']}"
        raise ConfigError(f"data.path={data.path}: there is no {data.path}.idx; {remedy}")


def _check_patterns(data: DataConfig, folders: bool) -> None:
    """Raise ConfigError unless ``data.path`` is a glob that matches a local file, or a list of such globs.

    Files at URLs are listed when the corpus is read.
    """
    if not all(isinstance(pattern, str) and pattern for pattern in patterns(data.path)):
        raise ConfigError(f"data.path={data.path}: neither a glob of files nor a list of globs; use [a/*.txt, b/*.txt]")
    for pattern in patterns(data.path):
        if is_remote(pattern):
            if folders:
                raise ConfigError(f"data.path={pattern}: images are read from local files; copy them to a folder")
            check_remote(pattern)
        elif not any(matching_files(pattern, folders)):
            raise ConfigError(f"data.path={pattern!r}: {_no_match(pattern, folders)}")
        elif data.source == "files":
            for file in matching_files(pattern):
                file_source(file.suffixes, str(file))


def check_remote(url: str) -> None:
    """Raise ConfigError, with the command, if the package that reads a URL is not installed."""
    from fsspec import get_filesystem_class
    from fsspec.registry import known_implementations

    protocol = re.split("::|://", url)[0]
    try:
        get_filesystem_class(protocol)
    except ImportError:
        package = known_implementations[protocol]["class"].partition(".")[0]
        package = "aiohttp" if package == "fsspec" else package  # a package that fsspec needs for HTTP
        raise ConfigError(f"data.path={url}: its package is not installed; run pip install {package}") from None
    except ValueError:
        raise ConfigError(
            f"data.path={url}: {protocol}:// is not known; use s3://, gs://, https:// or a local path"
        ) from None


def _no_match(path: str, folders: bool) -> str:
    """Return why a glob matches no file, and a remedy."""
    matches = glob.glob(os.path.expanduser(path), recursive=True)
    if not folders and any(map(os.path.isdir, matches)):
        return f"matches directories only; use '{path.rstrip('/')}/*.txt'"
    if others := [match for match in matches if not os.path.isdir(match)]:
        return f"{others[0]} is a broken link, a pipe or a device; use regular files"
    return f"matches no file; use a path or glob that exists in {os.getcwd()}"


def _check_blend(blend: Any) -> None:
    """Raise ConfigError unless ``data.blend`` maps existing sources to weights, or fractions of a run to such maps."""
    if not isinstance(blend, dict) or not blend:
        raise ConfigError(
            f"data.blend={blend}: not a map of directories to weights above 0; "
            "use directories of token files: 'data.blend={tokens/a: 0.7, tokens/b: 0.3}'"
        )
    stages = blend_stages(blend)
    staged = stages[0].weights is not blend
    if staged:
        _check_stages(blend, stages)
    for stage in stages:
        for path, weight in stage.weights.items():
            if type(weight) not in (int, float) or not 0 < weight < math.inf:
                at = f" from {stage.begin} on" if staged else ""
                raise ConfigError(
                    f"data.blend={blend}: the weight of {path}{at} is {weight}; use weights above 0, and leave out "
                    "sources without samples"
                )
    for path in blend_paths(blend):
        if not (is_megatron(path) or _has_tokens(path)):
            raise ConfigError(
                f"data.blend={blend}: {path} is not a directory of token files; use directories that python -m "
                "gpt4d.data.prepare wrote, or prefixes of Megatron's files"
            )


def _check_stages(blend: Any, stages: list[BlendStage]) -> None:
    for begin, weights in stages:
        if type(begin) not in (int, float) or not isinstance(weights, dict) or not weights:
            raise ConfigError(
                f"data.blend={blend}: {begin}: {weights} is not a stage; use fractions of the run and the weights from "
                "there on: 'data.blend={0: {tokens/a: 0.7, tokens/b: 0.3}, 0.8: {tokens/b: 1}}'"
            )
    if stages[0].begin != 0:
        raise ConfigError(
            f"data.blend={blend}: the first stage begins at {stages[0].begin} of the run; let it begin at 0"
        )
    for earlier, later in pairwise(stages):
        if not earlier.begin < later.begin < 1:
            raise ConfigError(
                f"data.blend={blend}: a stage at {later.begin} follows a stage at {earlier.begin}; use increasing "
                "fractions below 1"
            )


def _has_tokens(path: str) -> bool:
    """Return whether ``path`` is a directory that python -m gpt4d.data.prepare wrote."""
    return (Path(os.path.expanduser(path)) / HEADER).is_file()
