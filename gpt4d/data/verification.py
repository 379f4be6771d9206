"""Verification of token files by checksum: once per run, shared by the ranks, and remembered until a file changes."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from gpt4d.data import parts
from gpt4d.runtime.consensus import all_gather_json, run_on_all_ranks, run_on_rank0
from gpt4d.runtime.files import FileEntry, read_regular
from gpt4d.runtime.writing import replace_file, required_file

FILE = "verified.json"
_NAME = "verifying token files"
Files = Sequence[tuple[Path, FileEntry]]
State = list[int | str]  # size, time of the last change in ns, checksum


def verify(files: Files, run_dir: Path) -> None:
    """Compare files with the checksums of their entries, unless an earlier start of the run has already verified them.

    ``run_dir`` contains the record of verified files. All ranks call this and share the work.
    Raises ConfigError on every rank, naming the file, if a checksum differs.
    """
    record = run_dir / FILE
    due = run_on_rank0(lambda: _changed(files, _read(record)), "looking for changed token files")
    if not due:
        return
    share = sorted(due, key=lambda n: -files[n][1].bytes)[dist.get_rank() :: dist.get_world_size()]
    verified = run_on_all_ranks(lambda: {_key(files[n][0]): _verified(*files[n]) for n in share}, _NAME)
    states = {key: state for part in all_gather_json(verified, _NAME) for key, state in part.items()}
    run_on_rank0(lambda: _write(record, _read(record) | states), "recording verified token files")


def _changed(files: Files, remembered: dict[str, State]) -> list[int]:
    """Return the indices of files whose current state differs from the remembered one."""
    return [n for n, item in enumerate(files) if remembered.get(_key(item[0])) != _state(*item)]


def _key(path: Path) -> str:
    return str(path.resolve())


def _state(path: Path, entry: FileEntry) -> State:
    """Return the state in which a file is remembered; an empty list if it cannot be read."""
    with suppress(OSError):
        facts = path.stat()
        return [facts.st_size, facts.st_mtime_ns, entry.xxh3_128]
    return []


def _verified(path: Path, entry: FileEntry) -> State:
    before = _state(path, entry)  # A change while the file is read makes the next start read it again.
    parts.check_content([(path, entry)])
    return before


def _read(record: Path) -> dict[str, State]:
    """Return the states of verified files by path; empty for a missing or damaged record."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(read_regular(record)))
    return {}


def _write(record: Path, states: dict[str, State]) -> None:
    with required_file(record):
        replace_file(record, json.dumps(states, indent=1))
