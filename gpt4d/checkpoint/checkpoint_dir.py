"""The checkpoints of a run directory: listing, metadata, compatibility, commit and removal.

A checkpoint is written as ``checkpoints/step_00000100.partial``. Once every byte is on disk, it is committed by a
rename that removes the suffix. Directories with a suffix are not checkpoints. This module does not import torch.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpt4d.checkpoint import manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.files import counts, sync

META = "meta.json"
TOKENIZER = "tokenizer.json"
_FORMAT = 3
_PARTIAL, _REMOVED, _DAMAGED = ".partial", ".removed", ".damaged"
# Settings that decide the parameters' shapes and what the model computes.
_STRUCTURE = ("layers", "hidden", "heads", "vocab_size", "vocab_multiple", "max_positions", "norm_epsilon")


@dataclass
class Progress:
    """Progress of a run. ``samples`` is the data position: the index of the next sequence of the run."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0  # steps whose update was skipped


@dataclass
class Meta:
    """The metadata of a checkpoint, stored in ``meta.json``."""

    progress: Progress
    model: ModelConfig
    grid: dict[str, int]  # that wrote it
    data: str  # name of the corpus
    tokenizer: str  # SHA-256 of tokenizer.json, which defines the token ids
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)  # above which a loss or a norm is a spike
    format: int = _FORMAT

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read a checkpoint's metadata. Raises Damaged if it is invalid, ConfigError if its format is another."""

        def convert(values: dict) -> "Meta":
            if values["format"] != _FORMAT:
                raise ConfigError(
                    f"{directory}: checkpoint format {values['format']!r}, but this version reads format {_FORMAT}; "
                    "use the version that wrote it or set another run.name"
                )
            progress = Progress(**values.pop("progress"))
            counts(asdict(progress).values())
            meta = cls(progress, _to_model(values.pop("model")), **values)
            counts(meta.grid.values())
            if not all(isinstance(v, int | float) and v >= 0 for b in meta.bounds.values() for v in b.values()):
                raise ValueError(f"bounds={meta.bounds} are not numbers of at least 0")
            if not (isinstance(meta.data, str) and meta.data.isprintable() and isinstance(meta.tokenizer, str)):
                raise ValueError("data and tokenizer are not names")
            return meta

        return manifest.parse_json(directory / META, convert)


def _to_model(values: dict) -> ModelConfig:
    """Return the model's settings. Raises ValueError or TypeError if they are invalid."""
    model = ModelConfig(**values)
    sizes = [getattr(model, key) for key in _STRUCTURE if key != "norm_epsilon"]
    if 0 in counts(sizes) or model.hidden % model.heads or not str(model.name).isprintable():
        raise ValueError(f"{model} is invalid")
    return model


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
    if not checkpoints:
        raise ConfigError(f"{path}: neither a checkpoint nor a run with checkpoints; pass an existing one")
    return checkpoints[-1]


def check_fits(directory: Path, model: ModelConfig) -> None:
    """Raise ConfigError unless the checkpoint's model has the same structure as ``model``."""
    stored = Meta.read(directory).model
    for key in _STRUCTURE:
        if getattr(stored, key) != getattr(model, key):
            raise ConfigError(
                f"model.{key}={getattr(model, key)}: the checkpoint {directory} has {getattr(stored, key)}; use that "
                "value or set another run.name"
            )


def check_newest_fits(checkpoints: list[Path], model: ModelConfig) -> None:
    """Check the first readable one of ``checkpoints`` with ``check_fits``."""
    for directory in checkpoints:
        with suppress(Damaged):
            return check_fits(directory, model)


def begin(run_dir: Path, step: int) -> Path:
    """Remove leftovers and return the path at which to create and write the checkpoint of a step."""
    remove_leftovers(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for directory in (run_dir, run_dir.resolve().parent):
        sync(directory)
    return run_dir / "checkpoints" / (name(step) + _PARTIAL)


def commit(partial: Path) -> Path:
    """Rename a finished checkpoint to its final name. Raises OSError if that name exists."""
    final = partial.with_suffix("")
    os.rename(partial, final)
    sync(final.parent)
    return final


def retain(newest: Path, keep: int, keep_every: int | None) -> None:
    """Remove all checkpoints except ``newest``, the ``keep`` - 1 before it, and multiples of ``keep_every``."""
    run_dir = newest.parent.parent
    older = [path for path in committed(run_dir) if path != newest]
    for path in older[: len(older) - (keep - 1)]:
        if not keep_every or _step(path) % keep_every:
            # Renamed first, so that a partly removed checkpoint is not taken for a complete one.
            _remove(_add_suffix(path, _REMOVED))
    for path in _entries(run_dir):
        if path.name.endswith(_DAMAGED):
            _remove(path)


def quarantine(directory: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not loaded. It is kept for inspection until the next commit."""
    quarantined = directory.with_name(directory.name + _DAMAGED)
    if quarantined.exists():
        _remove(quarantined)
    return _add_suffix(directory, _DAMAGED)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what an interrupted save or removal left behind. Raises ConfigError if that fails."""
    for path in _entries(run_dir):
        if path.name.startswith("step_") and path.name.endswith((_PARTIAL, _REMOVED)):
            try:
                _remove(path)
            except OSError as error:
                raise ConfigError(f"run.dir={run_dir}: {path} cannot be removed ({error.strerror or error})") from None


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _add_suffix(directory: Path, suffix: str) -> Path:
    renamed = directory.with_name(directory.name + suffix)
    os.rename(directory, renamed)
    return renamed


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))
