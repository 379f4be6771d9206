"""The checkpoints of a run directory: which there are, what they say of themselves, whether they fit. No torch."""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt4d.config import ConfigError, ModelConfig

META = "meta.json"
FORMAT = 1
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
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        (directory / META).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """ConfigError if ``directory`` is not a whole checkpoint of this format."""
        try:
            values = json.loads((directory / META).read_text())
            model, progress = ModelConfig(**values.pop("model")), Progress(**values.pop("progress"))
            meta = cls(progress, model, **values)
            if meta.format != FORMAT:
                raise ValueError(f"format {meta.format}, this version reads {FORMAT}")
            return meta
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{directory}: not a checkpoint of gpt4d ({META}: {error})") from None


def name(step: int) -> str:
    return f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that are whole, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if re.fullmatch(r"step_\d{8,}", path.name) and (path / META).exists())


def chosen(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means: auto, never, or the path of a checkpoint or of a run.

    ConfigError if another than the newest of ``run_dir`` is meant: two runs in one directory would mix.
    """
    newest = next(reversed(committed(run_dir)), None)
    if resume == "auto":
        return newest
    source = None if resume == "never" else located(Path(resume))
    if newest and (source is None or source.resolve() != newest.resolve()):
        raise ConfigError(
            f"checkpoint.resume={resume}: {run_dir} holds another run's checkpoints, up to {newest.name}; "
            "choose another run.name, or remove them"
        )
    return source


def located(path: Path) -> Path:
    """The checkpoint at ``path``, which may be a run's directory too: then its newest. ConfigError if none is there."""
    if (path / META).exists():
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


def remove_old(run_dir: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints, and what an interrupted save left."""
    for path in committed(run_dir)[:-keep]:
        (path / META).unlink()  # first: what is half removed must not look whole
        shutil.rmtree(path)
    for path in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(path)
