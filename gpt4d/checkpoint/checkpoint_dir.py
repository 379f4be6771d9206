"""The checkpoints of a run directory: listing, metadata, compatibility, commit and removal.

A checkpoint is written as ``checkpoints/step_00000100.partial``. Once every byte is on disk, it is committed by a
rename that removes the suffix. Directories with a suffix are not checkpoints. This module does not import torch.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt4d import starts
from gpt4d.checkpoint import manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import (
    Change,
    Config,
    ConfigError,
    ModelConfig,
    changes,
    check_changes,
    is_allowed,
    recorded_settings,
)
from gpt4d.files import counts, sync
from gpt4d.model import registry
from gpt4d.model.family import Family
from gpt4d.writing import warn

META = "meta.json"
MODEL_FILES = "config.json", "generation_config.json"  # files of an imported model that its export needs
_FORMAT = 6
_PARTIAL, _REMOVED, _DAMAGED = ".partial", ".removed", ".damaged"


@dataclass
class Progress:
    """Progress of a run. ``samples`` is the data position: the index of the next sequence of the run."""

    step: int = 0
    samples: int = 0
    units: int = 0  # tokens or images, whatever the task counts in
    skipped: int = 0  # steps whose update was skipped

    def values(self, unit: str) -> dict[str, int]:
        """Return the values for a line of metrics.jsonl, with ``units`` under its own name."""
        return {"step": self.step, "samples": self.samples, unit: self.units, "skipped": self.skipped}


@dataclass
class Meta:
    """The metadata of a checkpoint, stored in ``meta.json`` with the format number and the model family's name.

    Attributes:
        progress: how far the run was.
        model: the settings of the model, of its family's dataclass.
        grids: axis sizes of each stage's grid; empty for an imported model.
        task: name of the task.
        identity: what the numbers of the data mean (``check_task``), such as the tokenizer's checksum.
        monitor: state of the loss monitor: named numbers per metric.
        settings: the settings that decide the run's results (``recorded_settings``); empty for an imported model.
        extra: names of additional tensors, stored as ``extra.NAME``. ``Saver`` sets it.
    """

    progress: Progress
    model: ModelConfig
    grids: list[dict[str, int]]
    task: str
    identity: dict[str, str]
    monitor: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)

    def to_json(self) -> bytes:
        values = {"format": _FORMAT, "family": registry.of(self.model).name, **asdict(self)}
        return (json.dumps(values, indent=1) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read the metadata. Raises Damaged if it is invalid, ConfigError for an unknown format or model family."""

        def convert(values: dict) -> "Meta":
            if (stored_format := values.pop("format")) != _FORMAT:
                raise ConfigError(
                    f"{directory}: checkpoint format {stored_format!r}, but this version reads format {_FORMAT}; "
                    "use the version that wrote it or set another run.name"
                )
            progress = Progress(**values.pop("progress"))
            counts(asdict(progress).values())
            meta = cls(progress, _to_model(registry.get(values.pop("family")), values.pop("model")), **values)
            counts(size for grid in meta.grids for size in grid.values())
            if not all(
                isinstance(v, int | float) and v >= 0 for state in meta.monitor.values() for v in state.values()
            ):
                raise ValueError(f"monitor={meta.monitor} has values other than numbers of at least 0")
            texts = [meta.task, *meta.identity.keys(), *meta.identity.values(), *meta.extra]
            if not all(isinstance(text, str) and text.isprintable() for text in texts):
                raise ValueError("task, identity or extra contains something other than printable text")
            if not isinstance(meta.settings, dict):
                raise ValueError(f"settings={meta.settings} is not a dictionary")
            return meta

        return manifest.parse_json(directory / META, convert)


def _to_model(family: Family, values: dict) -> ModelConfig:
    """Return a model's settings. Raises ValueError or TypeError if they are invalid."""
    model = family.config(**values)
    try:
        registry.check_model(model)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not model.name.isprintable():
        raise ValueError(f"{model.name!r} is not a name")
    return model


def documents(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the named files that a checkpoint has. It has no file that its manifest does not list."""
    listed = manifest.read(directory)
    return {name: (directory / name).read_bytes() for name in names if name in listed}


def name(step: int) -> str:
    return f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first. Raises ConfigError if its directory is not readable."""
    paths = (path for path in _entries(run_dir) if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir())
    return sorted(paths, key=_step)


def _entries(run_dir: Path) -> list[Path]:
    try:
        return list((run_dir / "checkpoints").iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir}: {error.filename} cannot be read ({error.strerror})") from None


def resume_candidates(resume: str, run_dir: Path) -> list[Path]:
    """Return the checkpoints that ``checkpoint.resume`` selects, in the order in which to try them.

    auto: those of ``run_dir``, newest first; never: none; a path: the checkpoint there. Raises ConfigError if
    ``run_dir`` has checkpoints and another than its newest is selected: two runs would mix in one directory.
    """
    own = committed(run_dir)[::-1]
    if resume == "auto":
        return own
    chosen = [] if resume == "never" else [located(Path(resume))]
    if own and [path.resolve() for path in chosen] != [own[0].resolve()]:
        raise ConfigError(
            f"checkpoint.resume={resume}: {run_dir} holds another run's checkpoints, up to {own[0].name}; "
            "set another run.name or remove them"
        )
    return chosen


def located(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest one if it is a run directory. Raises ConfigError if none is."""
    if (path / META).exists() or (path / manifest.MANIFEST).exists():
        return path
    checkpoints = committed(path)
    if not checkpoints and any((path / name).exists() for name in ("config.json", "model_index.json")):
        raise ConfigError(
            f"{path}: a model of transformers or diffusers; import it first with python -m gpt4d.checkpoint import "
            f"source={path} out=runs/NAME"
        )
    if not checkpoints:
        raise ConfigError(f"{path}: neither a checkpoint nor a run with checkpoints; pass an existing one")
    return checkpoints[-1]


_NEW_RUN, OTHER_INIT = "set another run.name", "set another checkpoint.init"  # remedies


def check_fits(directory: Path, model: ModelConfig, remedy: str = _NEW_RUN) -> None:
    """Raise ConfigError unless the checkpoint's model has the same family and structure as ``model``.

    ``remedy``: another way out than the value of the checkpoint, for the message.
    """
    stored, family = Meta.read(directory).model, registry.of(model)
    if type(stored) is not family.config:
        raise ConfigError(
            f"model={family.name}: the checkpoint {directory} is of family {registry.of(stored).name}; use a model of "
            f"that family or {remedy}"
        )
    for key in family.structure:
        if getattr(stored, key) != getattr(model, key):
            raise ConfigError(
                f"model.{key}={getattr(model, key)}: the checkpoint {directory} has {getattr(stored, key)}; use that "
                f"value or {remedy}"
            )


def check_task(
    directory: Path, task: str, identity: Mapping[str, str], allowed: Collection[str] = (), remedy: str = _NEW_RUN
) -> None:
    """Raise ConfigError unless the checkpoint is of ``task`` and its data has the same identity, whatever its name.

    Args:
        directory: the checkpoint.
        task: the task of this run.
        identity: the identity of its data. All entries must equal the checkpoint's except ``data``, the name.
        allowed: ``checkpoint.allow_changes``. It can allow other samples (``data``), but not another tokenizer, which
            gives token ids another meaning.
        remedy: another way out than data and task of the checkpoint, for the message.
    """
    meta = Meta.read(directory)
    if meta.task != task:
        raise ConfigError(
            f"task={task}: {directory} was trained for {meta.task}; use a model for that task or {remedy}"
        )
    may_differ = {"data", "samples"} if is_allowed("data.path", allowed) else {"data"}
    # An imported model has been trained on no samples of a run, and may have been imported without a tokenizer.
    compared = meta.identity.keys() | (identity.keys() if meta.grids else set())
    for key in sorted(compared - may_differ, key=lambda key: key == "samples"):
        if meta.identity.get(key) != identity.get(key):
            tokenizer = directory / "tokenizer.json"
            others = f", such as data.tokenizer={tokenizer}," if key == "tokenizer" and tokenizer.exists() else ""
            other, permission = "another", ""
            if key == "samples":
                other, permission = "other", ", or add checkpoint.allow_changes=[data]"
            raise ConfigError(
                f"data={identity.get('data')}: {directory} was trained with {other} {key}; use data with the same "
                f"{key}{others} or {remedy}{permission}"
            )


def check_settings(directory: Path, config: Config) -> dict[str, Change]:
    """Return the settings that differ from those with which a checkpoint was trained.

    Raises ConfigError if the checkpoint does not fit the model, or if a difference changes results and
    ``checkpoint.allow_changes`` does not list it.
    """
    check_fits(directory, config.model)
    found = changes(Meta.read(directory).settings, recorded_settings(asdict(config)))
    check_changes(found, config.checkpoint.allow_changes, str(directory))
    return found


def check_run(config: Config) -> dict[str, Change]:
    """Return the settings that differ from those with which the run of ``run.dir`` has been trained.

    The first readable checkpoint that ``checkpoint.resume`` selects decides, without one the last start. Raises
    ConfigError as ``check_settings`` does.
    """
    for directory in resume_candidates(config.checkpoint.resume, Path(config.run.dir)):
        with suppress(Damaged):
            return check_settings(directory, config)
    initial(config)
    return starts.check_last(config)


def initial(config: Config) -> Path | None:
    """Return the checkpoint of ``checkpoint.init``, whose weights a new run starts from; None if the key is not set.

    Raises ConfigError if it does not fit the model.
    """
    if config.checkpoint.init is None:
        return None
    directory = located(Path(os.path.expanduser(config.checkpoint.init)))
    check_fits(directory, config.model, OTHER_INIT)
    return directory


def begin(run_dir: Path, step: int) -> Path:
    """Remove leftovers and return the path at which to create and write the checkpoint of a step.

    Raises OSError if that path has a leftover that cannot be removed.
    """
    partial = run_dir / "checkpoints" / (name(step) + _PARTIAL)
    if partial.exists():
        _remove(partial)
    remove_leftovers(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for directory in (run_dir, run_dir.resolve().parent):
        sync(directory)
    return partial


def commit(partial: Path) -> Path:
    """Rename a finished checkpoint to its final name. Raises OSError if that name exists."""
    final = partial.with_suffix("")
    os.rename(partial, final)
    sync(final.parent)
    return final


def retain(newest: Path, keep: int, keep_every: int | None) -> None:
    """Remove all checkpoints except ``newest``, the ``keep`` - 1 before it, and multiples of ``keep_every``.

    Print a warning for a checkpoint that cannot be removed: the newest one is complete nevertheless.
    """
    run_dir = newest.parent.parent
    older = [path for path in committed(run_dir) if path != newest]
    for path in older[: len(older) - (keep - 1)]:
        if not keep_every or _step(path) % keep_every:
            with _warning(path):
                # Renamed first, so that a partly removed checkpoint is not taken for a complete one.
                _remove(_add_suffix(path, _REMOVED))
    for path in _entries(run_dir):
        if path.name.endswith(_DAMAGED):
            with _warning(path):
                _remove(path)


def quarantine(directory: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not loaded. It is kept for inspection until the next commit.

    Raises ConfigError if it cannot be renamed.
    """
    quarantined = directory.with_name(directory.name + _DAMAGED)
    try:
        if quarantined.exists():
            _remove(quarantined)
        return _add_suffix(directory, _DAMAGED)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{directory}: damaged, and cannot be renamed ({reason}); move it elsewhere") from None


def remove_leftovers(run_dir: Path) -> None:
    """Remove what an interrupted save or removal left behind. Print a warning for what cannot be removed."""
    for path in _entries(run_dir):
        if path.name.startswith("step_") and path.name.endswith((_PARTIAL, _REMOVED)):
            with _warning(path):
                _remove(path)


@contextmanager
def _warning(path: Path) -> Iterator[None]:
    """Print a warning if the body cannot remove ``path``. On NFS, a process that reads a checkpoint prevents that."""
    try:
        yield
    except OSError as error:
        warn(f"{path} cannot be removed ({error.strerror or error}) and takes disk space; a later save tries again")


def _remove(path: Path) -> None:
    """Remove a file or directory. Raises OSError if something remains; everything else is removed nevertheless."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            raise


def _add_suffix(directory: Path, suffix: str) -> Path:
    renamed = directory.with_name(directory.name + suffix)
    os.rename(directory, renamed)
    return renamed


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))
