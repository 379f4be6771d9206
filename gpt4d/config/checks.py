"""All the checks of a configuration that need no devices and no process group."""

import glob
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpt4d.config.schema import (
    ClusterConfig,
    Config,
    ConfigError,
    DataConfig,
    GridSizes,
    ParallelConfig,
    TrainConfig,
)


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


@dataclass(frozen=True)
class Divisibility:
    """A rule of a model: the product of some axes' sizes must divide an extent."""

    what: str  # the extent in the user's terms, such as model.hidden
    extent: int
    axes: tuple[str, ...]
    remedy: str = ""  # another way to satisfy it


def grid_problem(rules: Iterable[Divisibility], train: TrainConfig, sizes: GridSizes) -> str | None:
    """Return why a model with these rules and the batch cannot be split over a grid, in one line; None if they can."""
    for rule in rules:
        parts = math.prod(getattr(sizes, axis) for axis in rule.axes)
        if rule.extent % parts:
            axes = "·".join(f"g{axis}" for axis in rule.axes)
            remedy = f" ({rule.remedy})" if rule.remedy else ""
            return (
                f"parallel.{axes}={parts}: does not divide {rule.what}={rule.extent}; "
                f"use one of {_list(divisors(rule.extent))}{remedy}"
            )
    share, rest = divmod(train.batch_size, sizes.batch_shards)
    if rest:
        return (
            f"train.batch_size={train.batch_size}: cannot be split over parallel.gdata·gz={sizes.batch_shards}; "
            f"use a multiple of {sizes.batch_shards}"
        )
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        return (
            f"train.micro_batch_size={train.micro_batch_size}: does not divide a device's share of the batch, "
            f"train.batch_size/(gdata·gz)={share}; use one of {_list(divisors(share))}"
        )
    return None


def check_data(data: DataConfig) -> None:
    """All the checks of ``data`` alone.

    ConfigError for a value that will not do, if ``data.path`` or ``data.blend`` names nothing there, or
    ``data.tokenizer`` a missing file.
    """
    for key, least in (("tokenizer_vocab", 258), ("processes", 1), ("workers", 0)):  # 256 bytes, the end, one merge
        check_at_least(f"data.{key}", getattr(data, key), least)
    check_fraction("data.validation_fraction", data.validation_fraction)
    check_choice("data.source", data.source, ("sotu", "text", "jsonl", "parquet", "hub", "tokens", "blend"))
    if data.source not in ("sotu", "blend") and not data.path:
        needed = {"hub": "the name of its dataset", "tokens": "the directory of prepare's out=DIR"}
        what = needed.get(data.source, 'the glob of its files, e.g. data.path="books/*.txt"')
        raise ConfigError(f"data.path=null: data.source={data.source} needs {what}")
    if data.source == "blend" and not _is_blend(data.blend):
        raise ConfigError(
            f"data.blend={data.blend}: give directories of token files and weights above 0: "
            "'data.blend={tokens/a: 0.7, tokens/b: 0.3}'"
        )
    if data.source in ("text", "jsonl", "parquet"):
        found = glob.glob(os.path.expanduser(data.path), recursive=True)
        if not any(os.path.isfile(path) for path in found):
            mend = f": a directory; use '{data.path.rstrip('/')}/*.txt'" if found else f" (seen from {os.getcwd()})"
            raise ConfigError(f"data.path={data.path!r} matches no file{mend}")
    if data.tokenizer and data.tokenizer.endswith(".json") and not tokenizer_file(data.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer={data.tokenizer}: no such file")


def _is_blend(blend: Any) -> bool:
    """Whether it has texts and numbers above 0, which neither true nor infinity is."""
    return bool(isinstance(blend, dict) and blend) and all(
        isinstance(path, str) and type(weight) in (int, float) and 0 < weight < math.inf
        for path, weight in blend.items()
    )


def tokenizer_file(path: str) -> Path:
    """The file that ``data.tokenizer`` means."""
    path = Path(os.path.expanduser(path))  # as it is where there is no such user
    return path / "tokenizer.json" if path.is_dir() else path


def profiled_steps(config: Config) -> tuple[int, int] | None:
    """The first and the last step to trace. ConfigError unless the run can come to the first."""
    text, end = config.profile.steps, config.train.steps
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ConfigError(f"profile.steps={text!r}: use the number of a step, such as 10, or a range such as 10-12")
    first, last = int(match[1]), int(match[2] or match[1])
    if min(first, last) < 1:
        raise ConfigError(f"profile.steps={text}: the first step of a run is 1; use steps from 1 to {end}")
    if last < first:
        raise ConfigError(f"profile.steps={text}: the range ends before it begins; use {last}-{first}")
    if first > end:
        raise ConfigError(f"profile.steps={text}: the run ends with step train.steps={end}; use steps from 1 to {end}")
    return first, last


class ModelFamily(Protocol):
    """What the checks need of a model family (gpt4d.model.family.Family)."""

    def check(self, config: Config) -> None:
        """Raise ConfigError for model settings that are impossible on any grid."""

    def describe(self, config: Any) -> Any:
        """Return the model's description, which has ``blocks``."""


def check_values(config: Config, family: ModelFamily) -> None:
    """Check every value that needs no devices. Raises ConfigError that names the key, its value and the remedy."""
    train, optim = config.train, config.optim
    at_least = {
        "train.steps": 1, "train.seq_len": 1, "train.batch_size": 1, "train.micro_batch_size": 1,
        "train.validate_every": 0, "train.max_skipped": 1,
        "train.validation_batches": 0, "optim.lr": 0, "optim.min_lr": 0,
        "optim.warmup_steps": 0, "optim.schedule_steps": 1, "optim.weight_decay": 0, "optim.clip_norm": 0,
        "optim.epsilon": 0, "checkpoint.every": 0, "checkpoint.keep": 1, "checkpoint.keep_every": 1,
        "logging.every": 1, "logging.sample_tokens": 0, "parallel.overlap.prefetch": 0,
        "parallel.timeout_s": 1,
    }  # fmt: skip
    for key, least in at_least.items():
        check_at_least(key, value_of(config, key), least)
    for key in ("optim.beta1", "optim.beta2"):
        check_fraction(key, value_of(config, key))
    check_choice("parallel.mode", config.parallel.mode, ("4d", "atp", "auto"))
    check_choice("train.precision", train.precision, ("auto", "fp32", "bf16"))
    check_choice("train.activation_checkpointing", train.activation_checkpointing, ("none", "full"))
    check_choice("logging.wandb.mode", config.logging.wandb.mode, ("disabled", "offline", "online"))
    if optim.min_lr > optim.lr:
        raise ConfigError(f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}: the cosine goes down")
    family.check(config)
    layers, blocks = config.parallel.cache_layers, len(family.describe(config.model).blocks)
    if layers != "all" and not (isinstance(layers, int) and 0 <= layers <= blocks):
        raise ConfigError(f"parallel.cache_layers={layers}: not a number of blocks; use all, or 0 to {blocks}")
    profiled_steps(config)
    check_cluster(config.cluster)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        raise ConfigError(f"checkpoint.resume={resume!r}: no such directory; use auto, never, or a checkpoint's path")


def check_cluster(cluster: ClusterConfig) -> None:
    """All the checks of a machine. ConfigError for one that cannot be."""
    check_choice("cluster.device", cluster.device, ("cpu", "cuda"))
    for key in ("memory_gib", "matmul_tflops", "memory_gb_s"):
        check_above_0(f"cluster.{key}", getattr(cluster, key))
    for key in ("reserved_gib", "peak_tflops", "operation_us", "skew_us"):
        check_at_least(f"cluster.{key}", getattr(cluster, key), 0)
    if not cluster.levels:
        raise ConfigError("cluster.levels=[]: a machine has one level of links at the least, {group_gb_s: 1}")
    for number, level in enumerate(cluster.levels):
        name = f"cluster.levels[{number}]"
        if level.ranks is None and number:
            raise ConfigError(f"{name}.ranks=None: say how many it joins; only the outermost may leave it open")
        check_at_least(f"{name}.ranks", level.ranks, 1)
        check_above_0(f"{name}.group_gb_s", level.group_gb_s)
        check_above_0(f"{name}.pair_gb_s", level.pair_gb_s)
        check_at_least(f"{name}.latency_us", level.latency_us, 0)
    for number, entry in enumerate(cluster.measured):
        name = f"cluster.measured[{number}]"
        check_choice(f"{name}.kind", entry.kind, ("all_reduce", "all_gather", "reduce_scatter"))
        for key in ("local", "nodes", "sharing"):
            check_at_least(f"{name}.{key}", getattr(entry, key), 1)
        check_at_least(f"{name}.local·nodes", entry.local * entry.nodes, 2)
        check_above_0(f"{name}.gb_s", entry.gb_s)
        check_at_least(f"{name}.latency_us", entry.latency_us, 0)
        check_at_least(f"{name}.hidden", entry.hidden, 0)
    if cluster.atp_gb_s is not None and not _are_bandwidths(cluster.atp_gb_s):
        raise ConfigError(
            f"cluster.atp_gb_s={cluster.atp_gb_s}: meshes and two bandwidths above 0 of each, null for a dimension of "
            "one device: {2x4: [1.2, 4.95], 8x1: [0.97, null]}"
        )


def _are_bandwidths(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    for mesh, pair in found.items():
        dims = re.fullmatch(r"(\d+)x(\d+)", str(mesh))
        if not dims or not isinstance(pair, list) or len(pair) != 2:
            return False
        for size, bandwidth in zip(map(int, dims.groups()), pair, strict=True):
            if (bandwidth is None) != (size == 1) or (bandwidth is not None and not bandwidth > 0):
                return False
    return True


def check_above_0(key: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{key}={value}: use a value above 0")


def check_at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{key}={value}: use a value of at least {least}")


def check_fraction(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{key}={value}: use a value from 0 up to, not including, 1")


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """ConfigError unless the value of ``key`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{key}={value}: use one of {', '.join(choices)}")


def check_picture(key: str, path: str | None) -> None:
    """ConfigError unless a picture can be drawn to the value of ``key``, or none is asked for."""
    if path and Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{key}={path}: the name of a .png, .pdf or .svg file")
    if path and Path(path).is_dir():
        raise ConfigError(f"{key}={path}: a directory has this name; use another")
    if path and not Path(path).parent.is_dir():
        raise ConfigError(f"{key}={path}: no such directory as {Path(path).parent}")


def _list(values: list[int]) -> str:
    shown = values if len(values) <= 12 else [*values[:11], "…"]
    return ", ".join(map(str, shown))
