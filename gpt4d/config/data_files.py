"""The files that settings of the data name, by their paths alone."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpt4d.runtime.errors import ConfigError

PREPARED = ("tokens", "blend", "megatron")  # values of data.source that are token files already
CHECKPOINT = re.compile(r"step_\d{8,}")  # names of complete checkpoints
HEADER = "header.json"  # file of a directory of prepared data
_FORMATS = {  # suffixes of files of rows, and the data.source that reads them
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")  # suffixes of compressed files
_TEXT = (  # suffixes of files that data=files reads as text
    ".txt .text .md .markdown .rst .tex .html .htm .xml .log .srt .yaml .yml .toml .ini .cfg .css .sql .sh .py .pyi "
    ".c .h .cc .cpp .cxx .hh .hpp .cu .cs .go .rs .java .kt .scala .swift .js .jsx .ts .tsx .php .rb .pl .lua .r .jl "
    ".hs .ml .f90"
)


def patterns(path: Any) -> list[Any]:
    """Return the globs in ``data.path``, which is one or a list."""
    return path if isinstance(path, list) else [path]


def is_remote(path: str) -> bool:
    """Return whether a path is the URL of a file system of fsspec, such as s3://bucket/a.txt."""
    return "://" in path


def matching_files(path: str, folders: bool = False) -> Iterator[Path]:
    """Yield the files that a glob matches, some twice. With ``folders``, also yield the files below a folder ``path``.

    The search skips files and folders whose names begin with a dot.
    """
    pattern = os.path.expanduser(path)
    if folders and os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return (Path(match) for match in glob.iglob(pattern, recursive=True) if os.path.isfile(match))


class BlendStage(NamedTuple):
    """Weights of sources, by their paths, from a fraction of the run on."""

    begin: float
    weights: Mapping[str, float]


def blend_stages(blend: Mapping[Any, Any]) -> list[BlendStage]:
    """Return the stages of ``data.blend``. A map of sources to weights is one stage."""
    staged = any(isinstance(value, dict) for value in blend.values())
    return [BlendStage(*stage) for stage in blend.items()] if staged else [BlendStage(0, blend)]


def blend_paths(blend: Any) -> list[str]:
    """Return the path of each source of ``data.blend``, in the order of the stages; empty if it is not a map."""
    stages = blend_stages(blend) if isinstance(blend, dict) else []
    return [*dict.fromkeys(str(path) for stage in stages if isinstance(stage.weights, dict) for path in stage.weights)]


def is_megatron(path: str) -> bool:
    """Return whether ``path`` is the prefix of Megatron's two files, even if one is missing."""
    return any(os.path.isfile(os.path.expanduser(path) + suffix) for suffix in (".idx", ".bin"))


def suffix_source(suffixes: Iterable[str]) -> str | None:
    """Return the ``data.source`` that reads a file of rows with these suffixes; None if no suffix names a format."""
    lower = [suffix.lower() for suffix in suffixes]
    return next((source for suffix, source in _FORMATS.items() if suffix in lower), None)


def file_source(suffixes: Iterable[str], location: str) -> str:
    """Return the ``data.source`` that reads a file: jsonl, csv, parquet, arrow or text.

    Raises ConfigError, with the ``location`` of the file, if no suffix is known. A file without suffixes is text.
    """
    named = [suffix for suffix in suffixes if suffix.lower() not in _COMPRESSED]
    source = suffix_source(named)
    if source or not named or {*map(str.lower, named)} & {*_TEXT.split()}:
        return source or "text"
    raise ConfigError(
        f"{location}: the suffix {named[-1]} is not known to data=files; leave the file out, or read files of this "
        "format with data=text, jsonl, csv, parquet or arrow"
    )


def written_source(path: str) -> str:
    """Return the ``data.source`` of text files by the suffix of their glob; ``files`` for a glob without one."""
    suffixes = Path(path).suffixes
    return suffix_source(suffixes) or ("text" if suffixes else "files")


def tokenizer_file(path: str) -> Path:
    """Return the file that ``data.tokenizer`` refers to; for a run, the file in its newest checkpoint."""
    expanded = Path(os.path.expanduser(path))  # unchanged if the user of ~user is unknown
    return newest_file(expanded, "tokenizer.json") if expanded.is_dir() else expanded


def newest_file(directory: Path, name: str) -> Path:
    """Return the file ``name`` of the newest checkpoint that has it in a run; for other directories, the file in it."""
    stored = (file for file in directory.glob(f"checkpoints/*/{name}") if CHECKPOINT.fullmatch(file.parent.name))
    return max(stored, key=lambda file: int(file.parent.name[5:]), default=directory / name)
