"""The checkpoints of a run directory: which there are, what they say of themselves, whether they fit. No torch.

A checkpoint is written as ``checkpoints/step_00000100.partial`` and gets its name without the ending once every byte of
it is on the disk: by that one rename it is committed. Whatever has another ending is none.
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
# Fields of the model that decide its parameters' shapes and what they compute.
_STRUCTURE = ("layers", "hidden", "heads", "vocab_size", "vocab_multiple", "max_positions", "norm_epsilon")


@dataclass
class Progress:
    """How far a run has come. ``samples`` is the data position: the number of the next sequence of the run."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0  # steps without an update


@dataclass
class Meta:
    """What a checkpoint says of itself in ``meta.json``."""

    progress: Progress
    model: ModelConfig
    grid: dict[str, int]  # it was written on
    data: str  # the name of the corpus
    tokenizer: str  # SHA-256 of tokenizer.json: what its token ids mean
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)  # beyond which a loss or a norm is a spike
    format: int = _FORMAT

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Damaged if ``directory`` has none that means something, ConfigError if it is of another format."""

        def meta(values: dict) -> "Meta":
            if values["format"] != _FORMAT:
                raise ConfigError(
                    f"{directory}: a checkpoint of format {values['format']!r}, this version reads {_FORMAT}"
                )
            progress = Progress(**values.pop("progress"))
            counts(asdict(progress).values())
            found = cls(progress, _model(values.pop("model")), **values)
            counts(found.grid.values())
            if not all(isinstance(v, int | float) and v >= 0 for b in found.bounds.values() for v in b.values()):
                raise ValueError(f"bounds are not {found.bounds}")
            if not (isinstance(found.data, str) and found.data.isprintable() and isinstance(found.tokenizer, str)):
                raise ValueError("data and tokenizer are names")
            return found

        return manifest.parsed(directory / META, meta)


def _model(values: dict) -> ModelConfig:
    """ValueError or TypeError for what is no model."""
    model = ModelConfig(**values)
    sizes = [getattr(model, key) for key in _STRUCTURE if key != "norm_epsilon"]
    if 0 in counts(sizes) or model.hidden % model.heads or not str(model.name).isprintable():
        raise ValueError(f"{model} is no model")
    return model


def name(step: int) -> str:
    return f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first. ConfigError if its directory cannot be read."""
    found = (path for path in _entries(run_dir) if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir())
    return sorted(found, key=_step)


def _entries(run_dir: Path) -> list[Path]:
    try:
        return list((run_dir / "checkpoints").iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir}: {error.filename} cannot be read ({error.strerror})") from None


def resume_candidates(resume: str, run_dir: Path) -> list[Path]:
    """The checkpoints that ``checkpoint.resume`` means, in the order in which to try them.

    auto: those of ``run_dir``, the newest first; never: none; a path: the one it locates. ConfigError if another than
    the newest of ``run_dir`` is meant: two runs in one directory would mix.
    """
    own = committed(run_dir)[::-1]
    if resume == "auto":
        return own
    chosen = [] if resume == "never" else [located(Path(resume))]
    if own and [path.resolve() for path in chosen] != [own[0].resolve()]:
        raise ConfigError(
            f"checkpoint.resume={resume}: {run_dir} holds another run's checkpoints, up to {own[0].name}; "
            "choose another run.name, or remove them"
        )
    return chosen


def located(path: Path) -> Path:
    """The checkpoint at ``path``, which may be a run's directory too: then its newest. ConfigError if none is there."""
    if (path / META).exists() or (path / manifest.MANIFEST).exists():
        return path
    found = committed(path)
    if not found:
        raise ConfigError(f"{path}: neither a checkpoint nor a run with one in {path / 'checkpoints'}")
    return found[-1]


def check_fits(directory: Path, model: ModelConfig) -> None:
    """ConfigError unless the checkpoint is one of this model."""
    theirs = Meta.read(directory).model
    for key in _STRUCTURE:
        if getattr(theirs, key) != getattr(model, key):
            raise ConfigError(
                f"model.{key}={getattr(model, key)}: the checkpoint {directory} has {getattr(theirs, key)}; set it so, "
                "or train elsewhere with another run.name"
            )


def check_newest_fits(checkpoints: list[Path], model: ModelConfig) -> None:
    """``check_fits`` of the first of ``checkpoints`` that can be read."""
    for directory in checkpoints:
        with suppress(Damaged):
            return check_fits(directory, model)


def begin(run_dir: Path, step: int) -> Path:
    """The directory to write the checkpoint of a step to: not there yet, and nothing else that is no checkpoint."""
    remove_leftovers(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for directory in (run_dir, run_dir.resolve().parent):
        sync(directory)
    return run_dir / "checkpoints" / (name(step) + _PARTIAL)


def commit(partial: Path) -> Path:
    """Gives a checkpoint its name. OSError if there is one of that name."""
    final = partial.with_suffix("")
    os.rename(partial, final)
    sync(final.parent)
    return final


def retain(newest: Path, keep: int, keep_every: int | None) -> None:
    """Removes all of a run's checkpoints but ``newest``, the ``keep`` - 1 before, and those ``keep_every`` divides."""
    run_dir = newest.parent.parent
    older = [path for path in committed(run_dir) if path != newest]
    for path in older[: len(older) - (keep - 1)]:
        if not keep_every or _step(path) % keep_every:
            _remove(_renamed(path, _REMOVED))  # first another name: half a checkpoint must not look whole
    for path in _entries(run_dir):
        if path.name.endswith(_DAMAGED):
            _remove(path)


def quarantine(directory: Path) -> Path:
    """Takes a damaged checkpoint out of the run's. It is there to be looked at until the next is committed."""
    aside = directory.with_name(directory.name + _DAMAGED)
    if aside.exists():
        _remove(aside)
    return _renamed(directory, _DAMAGED)


def remove_leftovers(run_dir: Path) -> None:
    """Removes what an interrupted save or removal left. ConfigError if that cannot be."""
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


def _renamed(directory: Path, ending: str) -> Path:
    other = directory.with_name(directory.name + ending)
    os.rename(directory, other)
    return other


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))
