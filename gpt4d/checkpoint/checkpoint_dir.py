"""The checkpoints of a run directory: selection, metadata, and checks of a run's configuration against them.

A checkpoint is written as ``checkpoints/step_00000100.partial``. Once every byte is on disk, it is committed by a
rename that removes the suffix (``gpt4d.checkpoint.lifecycle``). Directories with a suffix are not checkpoints.
This module does not import torch.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt4d.checkpoint.tensor_files import MANIFEST, Damaged, Files, parse_json, read_manifest
from gpt4d.config import (
    CHECKPOINT,
    Change,
    Config,
    ConfigError,
    LoraConfig,
    ModelConfig,
    changes,
    check_changes,
    recorded_settings,
)
from gpt4d.config.keys import is_allowed
from gpt4d.data import tokenizers
from gpt4d.data.transformers_tokenizer import GENERATION_SETTINGS
from gpt4d.model import registry
from gpt4d.model.family import Family
from gpt4d.optim.schedule import SCHEDULE_KEYS, check_past_rates
from gpt4d.runs import starts
from gpt4d.runtime.files import FileEntry, counts

META = "meta.json"
MODEL_FILES = "config.json", GENERATION_SETTINGS  # files of an imported model that its export needs
_FORMAT = 6
_NEW_RUN, OTHER_INIT = "set another run.name", "set another checkpoint.init"  # remedies


@dataclass
class Progress:
    """Progress of a run. ``samples`` is the index of the next sequence of the run."""

    step: int = 0
    samples: int = 0
    units: int = 0  # tokens or images, the task's unit
    skipped: int = 0  # steps whose update was skipped

    def values(self, unit: str) -> dict[str, int]:
        """Return the values for a line of metrics.jsonl, with ``units`` under its own name."""
        return {"step": self.step, "samples": self.samples, unit: self.units, "skipped": self.skipped}


@dataclass
class Meta:
    """The metadata of a checkpoint, stored in ``meta.json`` with the format number and the model family's name."""

    progress: Progress  # how far the run was
    model: ModelConfig  # the settings of the model, of its family's dataclass
    grids: list[dict[str, int]]  # axis sizes of each stage's grid; empty for an imported model
    task: str  # name of the task
    identity: dict[str, str]  # fingerprints of the data (``check_task``), such as the tokenizer's checksum
    monitor: dict[str, dict[str, float]] = field(default_factory=dict)  # state of the loss monitor, by metric
    settings: dict[str, Any] = field(default_factory=dict)  # ``recorded_settings``; empty for an imported model
    validation: dict[str, float] = field(default_factory=dict)  # losses of validation sets at this step, by name
    position: dict[str, int] = field(default_factory=dict)  # of the next sample (``Task.position``)
    extra: list[str] = field(default_factory=list)  # names of additional tensors, stored as extra.NAME; set by Saver

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
            counts(values.get("position", {}).values())
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
            if not all(isinstance(loss, int | float) for loss in meta.validation.values()):
                raise ValueError(f"validation={meta.validation} has values other than numbers")
            return meta

        return parse_json(directory / META, convert)


def _to_model(family: Family, values: dict) -> ModelConfig:
    """Return a model's settings. Raises ValueError or TypeError if they are invalid."""
    adapters = values.pop("lora", None)
    model = family.config(**values, lora=adapters and LoraConfig(**adapters))
    try:
        registry.check_model(model)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not model.name.isprintable():
        raise ValueError(f"{model.name!r} is not a name")
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, whose files are read and validated once, on first access.

    The first access to ``meta``, ``manifest`` or ``files`` raises Damaged if the file is missing or invalid, and
    ConfigError if the file cannot be read.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Return the checkpoint at ``path``, or the newest one if it is a run directory.

        Raises ConfigError if ``path`` is neither.
        """
        if (path / META).exists() or (path / MANIFEST).exists():
            return cls(path)
        checkpoints = committed(path)
        if not checkpoints and any((path / name).exists() for name in ("config.json", "model_index.json")):
            raise ConfigError(
                f"{path}: a model of transformers or diffusers; import it first with python -m gpt4d.checkpoint import "
                f"source={path} out=runs/NAME"
            )
        if not checkpoints:
            raise ConfigError(f"{path}: neither a checkpoint nor a run with checkpoints; pass an existing one")
        return cls(checkpoints[-1])

    @cached_property
    def meta(self) -> Meta:
        """The metadata. Raises ConfigError also for an unknown format or model family."""
        return Meta.read(self.path)

    @cached_property
    def manifest(self) -> dict[str, FileEntry]:
        """The size and checksum of each file, by file name."""
        return read_manifest(self.path)

    @cached_property
    def files(self) -> Files:
        """The stored tensors; their index is read here, their values on access."""
        return Files(self.path)

    def documents(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of the named files that the manifest lists."""
        return {name: (self.path / name).read_bytes() for name in names if name in self.manifest}

    def model_files(self) -> dict[str, bytes]:
        """Return the settings of an imported model, and the files of the tokenizer, by name.

        The tokenizer puts those tokens before a text with which the model was trained.
        """
        files = self.documents(name for name in self.manifest if name in MODEL_FILES or tokenizers.belongs(name))
        try:
            return tokenizers.as_trained(files, self.meta.identity, self.path) if self.meta.grids else files
        except ValueError as error:
            raise Damaged(f"{self.path / META}: damaged ({error})") from None

    def check_fits(self, model: ModelConfig, remedy: str = _NEW_RUN, other_positions: bool = False) -> None:
        """Raise ConfigError unless the checkpoint's model has the same family and structure as ``model``.

        Adapters of ``model`` may be new. With ``other_positions`` so may settings of positions without weights.
        ``remedy``: the alternative to the checkpoint's value, for the message.
        """
        stored, family = self.meta.model, registry.of(model)
        if type(stored) is not family.config:
            raise ConfigError(
                f"model={family.name}: the checkpoint {self.path} is of family {registry.of(stored).name}; use a model "
                f"of that family or {remedy}"
            )
        for key, (before, after) in family.changed_structure(stored, model).items():
            if not (other_positions and key in family.positions):
                raise ConfigError(
                    f"model.{key}={after}: the checkpoint {self.path} has {before}; use that value or {remedy}"
                )
        if stored.lora not in (None, model.lora):
            targets = ",".join(stored.lora.targets)
            raise ConfigError(
                f"lora.rank={model.lora.rank if model.lora else 0}: the checkpoint {self.path} has other adapters; use "
                f"lora.rank={stored.lora.rank} lora.alpha={stored.lora.alpha or 'null'} lora.targets=[{targets}], or "
                "merge its adapters with python -m gpt4d.checkpoint export and import the result"
            )

    def check_task(
        self, task: str, identity: Mapping[str, str], allowed: Collection[str] = (), remedy: str = _NEW_RUN
    ) -> None:
        """Raise ConfigError unless the checkpoint has the task ``task`` and data with the same identity.

        Args:
            task: the task of this run.
            identity: the identity of its data. All entries except ``data``, the name, must equal the checkpoint's.
            allowed: ``checkpoint.allow_changes``. It can allow other samples (``data``), but not another tokenizer,
                which gives token ids another meaning.
            remedy: the alternative to the checkpoint's data and task, for the message.
        """
        meta = self.meta
        if meta.task != task:
            raise ConfigError(
                f"task={task}: {self.path} was trained for {meta.task}; use a model for that task or {remedy}"
            )
        may_differ = {"data", "samples", tokenizers.BEGIN} if is_allowed("data.path", allowed) else {"data"}
        # An imported model has been trained on no samples of a run, and may have been imported without a tokenizer.
        compared = meta.identity.keys() | (identity.keys() if meta.grids else set())
        if not meta.grids or tokenizers.BEGIN not in meta.identity:  # the samples differ as well
            compared.discard(tokenizers.BEGIN)
        for key in sorted(compared - may_differ, key=lambda key: key == "samples"):
            if meta.identity.get(key) != identity.get(key):
                tokenizer = self.path / "tokenizer.json"
                others = f", such as data.tokenizer={tokenizer}," if key == "tokenizer" and tokenizer.exists() else ""
                other, permission = "another", ""
                if key == "samples":
                    other, permission = "other", ", or add checkpoint.allow_changes=[data]"
                raise ConfigError(
                    f"data={identity.get('data')}: {self.path} was trained with {other} {key}; use data with the same "
                    f"{key}{others} or {remedy}{permission}"
                )

    def check_settings(self, config: Config) -> dict[str, Change]:
        """Return the settings that differ from those with which the checkpoint was trained.

        Raises ConfigError if the checkpoint does not fit the model, or if a difference changes results and
        ``checkpoint.allow_changes`` does not list it. A new ``optim.decay_from`` and other settings of the schedule
        need not be listed: they must not change the learning rates with which the checkpoint was trained.
        """
        self.check_fits(config.model)
        found = changes(self.meta.settings, recorded_settings(asdict(config)))
        allowed = list(config.checkpoint.allow_changes)
        decay = found.get("optim.decay_from")
        if decay and decay.after is not None and not is_allowed("optim.decay_from", allowed):
            check_past_rates(self.meta.settings, config, self.meta.progress.step, self.path)
            allowed += SCHEDULE_KEYS
        check_changes(found, allowed, str(self.path))
        return found


def name(step: int) -> str:
    """Return the name of a step's checkpoint directory: ``step_00000100`` for 100."""
    return f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """Return the step of a committed checkpoint from the name of its directory."""
    return int(directory.name.removeprefix("step_"))


def committed(run_dir: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first. Raises ConfigError if its directory is not readable."""
    paths = (path for path in listing(run_dir) if CHECKPOINT.fullmatch(path.name) and path.is_dir())
    return sorted(paths, key=step_of)


def listing(run_dir: Path) -> list[Path]:
    """Return all entries of a run's directory of checkpoints. Raises ConfigError if it is not readable."""
    try:
        return list((run_dir / "checkpoints").iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir}: {error.filename} cannot be read ({error.strerror})") from None


def resume_candidates(resume: str, run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints that ``checkpoint.resume`` selects, in the order in which to try them.

    ``auto`` selects the checkpoints of ``run_dir``, newest first, and ``never`` selects no checkpoint. A path selects
    the checkpoint there. Raises ConfigError if ``run_dir`` has checkpoints and a different checkpoint than the newest
    is selected, because one directory must not mix two runs.
    """
    own = [Checkpoint(path) for path in reversed(committed(run_dir))]
    if resume == "auto":
        return own
    chosen = [] if resume == "never" else [Checkpoint.open(Path(resume))]
    if own and [checkpoint.path.resolve() for checkpoint in chosen] != [own[0].path.resolve()]:
        raise ConfigError(
            f"checkpoint.resume={resume}: {run_dir} holds another run's checkpoints, up to {own[0].path.name}; "
            "set another run.name or remove them"
        )
    return chosen


def check_run(config: Config) -> dict[str, Change]:
    """Return the settings that differ from those with which the run of ``run.dir`` has been trained.

    The first readable checkpoint that ``checkpoint.resume`` selects provides the settings of the run. Without a
    checkpoint, the last start provides them. Raises ConfigError as ``check_settings`` does.
    """
    for checkpoint in resume_candidates(config.checkpoint.resume, Path(config.run.dir)):
        with suppress(Damaged):
            return checkpoint.check_settings(config)
    initial(config)
    return starts.check_last(config)


def initial(config: Config) -> Checkpoint | None:
    """Return the checkpoint ``checkpoint.init`` with the initial weights of a new run; None if the key is not set.

    Raises ConfigError if it does not fit the model. Only its settings of positions without weights may be others.
    """
    if config.checkpoint.init is None:
        return None
    checkpoint = Checkpoint.open(Path(os.path.expanduser(config.checkpoint.init)))
    checkpoint.check_fits(config.model, OTHER_INIT, other_positions=True)
    return checkpoint
