"""The checkpoints of a run directory: which there are, what they say of themselves, whether they fit. No torch.

A checkpoint is written as ``checkpoints/step_00000100.partial`` and gets its name without the ending once every byte of
it is on the disk: by that one rename it is committed. Whatever has another ending is none.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt4d.checkpoint import manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, ModelConfig

META = "meta.json"
TOKENIZER = "tokenizer.json"
_FORMAT = 2
_PARTIAL, _REMOVED, _DAMAGED = ".partial", ".removed", ".damaged"
# Fields of the model that decide its parameters' shapes and what they compute.
_STRUCTURE = ("layers", "hidden", "heads", "vocab_size", "vocab_multiple", "max_positions", "norm_epsilon")


@dataclass
class Progress:
    """How far a run has come. ``samples`` is the data position: the number of the next sequence of the run."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass
class Meta:
    """What a checkpoint says of itself in ``meta.json``."""

    progress: Progress
    model: ModelConfig
    grid: dict[str, int]  # it was written on
    data: str  # the name of the corpus
    tokenizer: str  # SHA-256 of tokenizer.json: what its token ids mean
    format: int = _FORMAT

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Damaged if ``directory`` has none that can be read, ConfigError if it is of another format."""
        try:
            values = json.loads((directory / META).read_bytes())
            if values["format"] == _FORMAT:
                model, progress = ModelConfig(**values.pop("model")), Progress(**values.pop("progress"))
                return cls(progress, model, **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{directory / META}: not that of a checkpoint of gpt4d ({error})") from None
        raise ConfigError(f"{directory}: a checkpoint of format {values['format']!r}, this version reads {_FORMAT}")


def name(step: int) -> str:
    return f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted((path for path in found if re.fullmatch(r"step_\d{8,}", path.name)), key=_step)


def to_try(resume: str, run_dir: Path) -> list[Path]:
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
    return run_dir / "checkpoints" / (name(step) + _PARTIAL)


def commit(partial: Path) -> Path:
    """Gives a checkpoint its name. OSError if there is one of that name."""
    final = partial.with_suffix("")
    os.rename(partial, final)
    manifest.sync_directory(final.parent)
    return final


def retain(run_dir: Path, keep: int, keep_every: int | None) -> None:
    """Removes all but the ``keep`` newest checkpoints and those of steps that ``keep_every`` divides."""
    for path in committed(run_dir)[:-keep]:
        if not keep_every or _step(path) % keep_every:
            shutil.rmtree(_renamed(path, _REMOVED))  # first another name: half a checkpoint must not look whole
    for path in (run_dir / "checkpoints").glob("step_*" + _DAMAGED):
        shutil.rmtree(path)


def set_aside(directory: Path) -> Path:
    """Takes a damaged checkpoint out of the run's. It is there to be looked at until the next is committed."""
    shutil.rmtree(directory.with_name(directory.name + _DAMAGED), ignore_errors=True)
    return _renamed(directory, _DAMAGED)


def remove_leftovers(run_dir: Path) -> None:
    """Removes what an interrupted save or removal left."""
    for ending in (_PARTIAL, _REMOVED):
        for path in (run_dir / "checkpoints").glob("step_*" + ending):
            shutil.rmtree(path)


def _renamed(directory: Path, ending: str) -> Path:
    other = directory.with_name(directory.name + ending)
    os.rename(directory, other)
    return other


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))
