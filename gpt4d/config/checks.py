"""Checks of a configuration that need no devices and no process group."""

import glob
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gpt4d.config.batch_ramp import batch_sizes, ramp_text
from gpt4d.config.cluster import check_cluster, check_precision
from gpt4d.config.fields import ConfigError, check_limits
from gpt4d.config.identity import check_allowed
from gpt4d.config.schema import (
    HELD_OUT,
    IMAGE_SOURCES,
    TEXT_SOURCES,
    Config,
    DataConfig,
    GridSizes,
    MuonConfig,
    ParallelConfig,
    TrainConfig,
)
from gpt4d.config.values import divisors, shortened, value_of

FLOAT8_MULTIPLE = 16  # divides the rows, columns and contracted elements of a float8 product on a GPU


@dataclass(frozen=True)
class Divisibility:
    """Rule of a model: the product of the sizes of some axes must divide an extent."""

    quantity: str  # name of the extent in the user's terms, such as model.hidden
    extent: int
    axes: tuple[str, ...]
    remedy: str = ""  # another way to satisfy it


def grid_problem(
    rules: Iterable[Divisibility], train: TrainConfig, parallel: ParallelConfig, sizes: GridSizes
) -> str | None:
    """Return one line that explains why a grid cannot split the batch or a model with these rules; None if it can."""
    for rule in rules:
        parts = math.prod(getattr(sizes, axis) for axis in rule.axes)
        if rule.extent % parts:
            axes = "·".join(f"g{axis}" for axis in rule.axes)
            remedy = f" ({rule.remedy})" if rule.remedy else ""
            return (
                f"parallel.{axes}={parts}: does not divide {rule.quantity}={rule.extent}; "
                f"use one of {shortened(divisors(rule.extent))}{remedy}"
            )
    for size in batch_sizes(train)[:-1]:
        micro_batch_size = train.micro_batch_size and min(train.micro_batch_size, max(1, size // sizes.batch_shards))
        smaller = replace(train, batch_size=size, batch_ramp=None, micro_batch_size=micro_batch_size)
        if problem := grid_problem((), smaller, parallel, sizes):
            return f"train.batch_ramp={ramp_text(train)}: its batch of {size} is not possible: {problem}"
    share, rest = divmod(train.batch_size, sizes.batch_shards)
    if rest:
        return (
            f"train.batch_size={train.batch_size}: cannot be split over parallel.gdata·gz={sizes.batch_shards}; "
            f"use a multiple of {sizes.batch_shards}"
        )
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        return (
            f"train.micro_batch_size={train.micro_batch_size}: does not divide a device's share of the batch, "
            f"train.batch_size/(gdata·gz)={share}; use one of {shortened(divisors(share))}"
        )
    if (parallel.pipeline.stages or 1) > 1:
        return None  # gpt4d.config.pipeline decides how large a microbatch is
    return chunk_problem(train, parallel, sizes, train.micro_batch_size or share)


def chunk_problem(train: TrainConfig, parallel: ParallelConfig, sizes: GridSizes, micro_batch: int) -> str | None:
    """Return one line that explains why ``micro_batch`` samples cannot be cut into chunks; None if they can."""
    samples, rest = divmod(micro_batch, parallel.chunks)
    if rest:
        return (
            f"parallel.chunks={parallel.chunks}: does not divide a device's microbatch of {micro_batch} sample(s); "
            f"use one of {shortened(divisors(micro_batch))}, or another train.micro_batch_size"
        )
    tokens = samples * train.seq_len
    if parallel.sequence_parallel and tokens % sizes.x:
        key, count = "train.micro_batch_size", share_multiple(train, parallel, sizes)
        if train.micro_batch_size is None:
            key, count = "train.batch_size", count * sizes.batch_shards
        return (
            f"parallel.sequence_parallel=true: parallel.gx={sizes.x} does not divide the {tokens} tokens of a chunk; "
            f"use a multiple of {sizes.x} for train.seq_len, a multiple of {count} for {key}, or "
            "parallel.sequence_parallel=false"
        )
    if train.precision == "fp8" and tokens % FLOAT8_MULTIPLE:
        return (
            f"train.precision=fp8: multiplies multiples of {FLOAT8_MULTIPLE} tokens, and a chunk of a device's "
            f"microbatch has {tokens}; use a multiple of {FLOAT8_MULTIPLE} for train.seq_len, or train.precision=bf16"
        )
    return None


def share_multiple(train: TrainConfig, parallel: ParallelConfig, sizes: GridSizes) -> int:
    """Return the divisor that a device's number of samples per microbatch needs to be cut into chunks."""
    tokens = math.lcm(sizes.x if parallel.sequence_parallel else 1, FLOAT8_MULTIPLE if train.precision == "fp8" else 1)
    return parallel.chunks * tokens // math.gcd(tokens, train.seq_len)


CHECKPOINT = re.compile(r"step_\d{8,}")  # names of complete checkpoints
HEADER = "header.json"  # file of a directory of prepared data
_SOURCES = {"text": TEXT_SOURCES, "images": IMAGE_SOURCES}
_DATA = {"text": "data=sotu, data=text or data=jsonl", "images": "data=blue_marble, data=pictures or data=cifar10"}
_PATHS = {  # an example of data.path for each source that needs one
    "hub": "the name of a dataset",
    "tokens": "the directory that prepare wrote to out=DIR",
    "text": 'a glob of files, such as data.path="books/*.txt"',
    "jsonl": 'a glob of files, such as data.path="crawl/*.jsonl.zst"',
    "parquet": 'a glob of files, such as data.path="crawl/*.parquet"',
    "chat": 'a glob of files, such as data.path="sft/*.jsonl"',
    "pictures": 'a folder or a glob of files, such as data.path="photos/*.jpg"',
}


def check_data(data: DataConfig, model: str) -> None:
    """Check the ``data`` settings of a run that trains the model named ``model`` on text.

    Raises ConfigError for an invalid value, or if ``data.path`` or ``data.tokenizer`` names no existing file.
    """
    if data.tokenizer_vocab is None:
        raise ConfigError("data.tokenizer_vocab=null: the model has no vocabulary; set the tokenizer's size")
    _check_source(data, "text", model)
    if data.source == "blend" and not _is_blend(data.blend):
        raise ConfigError(
            f"data.blend={data.blend}: not a map of directories to weights above 0; "
            "use directories of token files: 'data.blend={tokens/a: 0.7, tokens/b: 0.3}'"
        )
    if data.source == "chat" and not data.tokenizer:
        raise ConfigError(
            "data.tokenizer=null: conversations need the tokenizer of the model that is trained on them; set it to the "
            "model's run or directory, or its hub name"
        )
    if data.chat_template and not os.path.isfile(os.path.expanduser(data.chat_template)):
        raise ConfigError(f"data.chat_template={data.chat_template}: no such file; use an existing file")
    if data.tokenizer and data.tokenizer.endswith(".json") and not tokenizer_file(data.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer={data.tokenizer}: no such file; use gpt2, a hub name or an existing file")
    _check_validation_sets(data.validation)


def _check_validation_sets(sets: Any) -> None:
    """Raise ConfigError unless ``data.validation`` maps names to token directories and globs of existing files."""
    if sets is None:
        return
    if not isinstance(sets, dict) or not sets or not all(isinstance(path, str) and path for path in sets.values()):
        raise ConfigError(
            f"data.validation={sets}: not a map of names to token directories or globs of files; "
            "use 'data.validation={books: tokens/books, code: \"code/*.py\"}'"
        )
    for name, path in sets.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"data.validation={sets}: {name!r} is not a name of a validation set; use letters, digits and "
                "underscores"
            )
        if name == HELD_OUT:
            raise ConfigError(
                f"data.validation.{name}={path}: {name} is the name of the documents that the run holds out; use "
                "another name"
            )
        if os.path.isdir(os.path.expanduser(path)):
            if not (Path(os.path.expanduser(path)) / HEADER).is_file():
                raise ConfigError(
                    f"data.validation.{name}={path}: a directory without token files; use a directory that python -m "
                    "gpt4d.data.prepare wrote, or a glob of files such as 'books/*.txt'"
                )
        elif not any(matching_files(path)):
            raise ConfigError(f"data.validation.{name}={path}: {_no_match(path, folders=False)}")


def check_image_data(data: DataConfig, model: str) -> None:
    """Check the ``data`` settings of a run that trains the model named ``model`` on images.

    Raises ConfigError for an invalid value, or if ``data.path`` names no existing file.
    """
    _check_source(data, "images", model)


def _check_source(data: DataConfig, kind: str, model: str) -> None:
    """Check the settings that text and images have in common. ``kind`` is ``text`` or ``images``."""
    if not data.name or {"/", "\0"} & {*data.name} or data.name in (".", ".."):
        raise ConfigError(f"data.name={data.name!r}: it names a directory in data.cache_dir; use a name without /")
    (other,) = _SOURCES.keys() - {kind}
    if data.source in _SOURCES[other] and data.source not in _SOURCES[kind]:
        raise ConfigError(f"data.source={data.source}: {other}, but model={model} trains on {kind}; use {_DATA[kind]}")
    if data.source not in _PATHS:
        return
    if not data.path:
        raise ConfigError(f"data.path=null: data.source={data.source} needs a path; set {_PATHS[data.source]}")
    if data.source not in ("hub", "tokens") and not any(matching_files(data.path, folders=kind == "images")):
        raise ConfigError(f"data.path={data.path!r}: {_no_match(data.path, folders=kind == 'images')}")


def _no_match(path: str, folders: bool) -> str:
    """Return why a glob matches no file, and a remedy."""
    matches = glob.glob(os.path.expanduser(path), recursive=True)
    if not folders and any(map(os.path.isdir, matches)):
        return f"matches directories only; use '{path.rstrip('/')}/*.txt'"
    if others := [match for match in matches if not os.path.isdir(match)]:
        return f"{others[0]} is a broken link, a pipe or a device; use regular files"
    return f"matches no file; use a path or glob that exists in {os.getcwd()}"


def matching_files(path: str, folders: bool = False) -> Iterator[Path]:
    """Yield the files that a glob matches, some twice. With ``folders``, also yield the files below a folder ``path``.

    The search skips files and folders whose names begin with a dot.
    """
    pattern = os.path.expanduser(path)
    if folders and os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return (Path(match) for match in glob.iglob(pattern, recursive=True) if os.path.isfile(match))


def _is_blend(blend: Any) -> bool:
    """Return whether ``blend`` maps paths to finite weights above 0; a Boolean is not a weight."""
    return bool(isinstance(blend, dict) and blend) and all(
        isinstance(path, str) and type(weight) in (int, float) and 0 < weight < math.inf
        for path, weight in blend.items()
    )


def written_source(path: str) -> str:
    """Return the ``data.source`` of text files, by the suffixes of their glob: jsonl, parquet or text."""
    return next((source for source in ("jsonl", "parquet") if f".{source}" in Path(path).suffixes), "text")


def tokenizer_file(path: str) -> Path:
    """Return the file that ``data.tokenizer`` refers to; for a run, the file in its newest checkpoint."""
    expanded = Path(os.path.expanduser(path))  # unchanged if the user of ~user is unknown
    if not expanded.is_dir():
        return expanded
    stored = (file for file in expanded.glob("checkpoints/*/tokenizer.json") if CHECKPOINT.fullmatch(file.parent.name))
    return max(stored, key=lambda file: int(file.parent.name[5:]), default=expanded / "tokenizer.json")


def profiled_steps(config: Config, length_known: bool = True) -> tuple[int, int] | None:
    """Return the first and last step to trace; None if no step is traced.

    Raises ConfigError unless the run reaches the first step. ``length_known``: ``train.steps`` is the run's length.
    """
    text, end = config.profile.steps, config.train.steps
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ConfigError(f"profile.steps={text!r}: neither a step nor a range; use 10 or 10-12, for example")
    first, last = int(match[1]), int(match[2] or match[1])
    if min(first, last) < 1:
        raise ConfigError(f"profile.steps={text}: the first step of a run is 1; use steps from 1 to {end}")
    if last < first:
        raise ConfigError(f"profile.steps={text}: the range ends before it begins; use {last}-{first}")
    if first > end and length_known:
        raise ConfigError(f"profile.steps={text}: the run ends with step train.steps={end}; use steps from 1 to {end}")
    return first, last


class ModelFamily(Protocol):
    """Part of a model family (gpt4d.model.family.Family) that the checks need."""

    @property
    def unit(self) -> str: ...  # tokens or images

    def check(self, config: Config) -> None:
        """Raise ConfigError for model settings that are impossible on any grid."""

    def describe(self, config: Any) -> Any:
        """Return the model's description, which has ``blocks``."""


def check_values(config: Config, family: ModelFamily) -> None:
    """Check all values, without devices. Raises ConfigError that names the key, its value and the remedy."""
    check_limits(config)
    for key in ("run.name", "run.dir"):
        if not value_of(config, key):
            raise ConfigError(f"{key}='': a run needs one; set it, or leave it out")
    if config.run.world_size is not None and not config.run.dry:
        raise ConfigError(
            f"run.world_size={config.run.world_size}: a run has as many devices as processes; add --dry-run, or start "
            "this many with torchrun or srun"
        )
    _check_mode(config.parallel)
    family.check(config)
    _check_layers(config.parallel, len(family.describe(config.model).blocks))
    profiled_steps(config, length_known=config.train.epochs is None)
    _check_cuda_graphs(config)
    _check_lora(config, family)
    _check_width_transfer(config)
    if len(coefficients := config.optim.muon.coefficients) != 3:
        raise ConfigError(
            f"optim.muon.coefficients={coefficients}: {len(coefficients)} numbers; use three, as in the default "
            f"{MuonConfig().coefficients}"
        )
    if config.evaluate.every and not config.evaluate.tasks:
        raise ConfigError(
            f"evaluate.every={config.evaluate.every}: no task is named; set evaluate.tasks=[hellaswag], for example"
        )
    check_cluster(config.cluster)
    check_precision(config.train.precision, config.cluster)
    check_allowed(config.checkpoint.allow_changes)
    _check_keep_best(config)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        if resume.lower() in ("true", "yes", "1", "false", "no", "0"):
            remedy = "auto, the default" if resume.lower() in ("true", "yes", "1") else "never"
            raise ConfigError(f"checkpoint.resume={resume.lower()}: not a way to resume; use {remedy}")
        raise ConfigError(
            f"checkpoint.resume={resume!r}: no such directory; use auto, never or the path of a checkpoint"
        )
    if (init := config.checkpoint.init) is not None and resume not in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.init={init}: checkpoint.resume={resume} continues another run with its optimizer; set one of "
            "these keys"
        )


def _check_width_transfer(config: Config) -> None:
    """Raise ConfigError if ``optim.width_transfer`` has no base model."""
    model, key = config.model, config.model.width_key
    if config.optim.width_transfer and model.relative_width() is None:
        if not key:
            raise ConfigError(f"optim.width_transfer=true: model={model.name} has no key of its width; leave it out")
        raise ConfigError(
            f"optim.width_transfer=true: no base model; set model.base_{key} to the model.{key} of the model whose "
            "learning rate you have tuned"
        )


def _check_lora(config: Config, family: ModelFamily) -> None:
    """Raise ConfigError if the model cannot have adapters."""
    lora = config.lora
    if not lora.rank:
        return
    if family.unit != "tokens":
        raise ConfigError(f"lora.rank={lora.rank}: model={config.model.name} has no adapters; use a text model")
    if not lora.targets:
        raise ConfigError("lora.targets=[]: no layer has adapters; name at least one, or leave it out")
    if config.optim.uses_muon:
        raise ConfigError(
            f"optim.algorithm=muon: lora.rank={lora.rank} freezes the weights that Muon updates, and adapters train "
            "with AdamW; leave optim=muon out"
        )
    if config.train.precision == "fp8":
        raise ConfigError(
            f"lora.rank={lora.rank}: train.precision=fp8 trains all weights; use train.precision=bf16 with adapters"
        )


def _check_keep_best(config: Config) -> None:
    """Raise ConfigError unless ``checkpoint.keep_best`` names a set that is evaluated before each checkpoint."""
    name, every, validated = config.checkpoint.keep_best, config.checkpoint.every, config.train.validate_every
    if name is None:
        return
    possible = [HELD_OUT, *(config.data.validation or ())]
    if name not in possible:
        remedy = f"use one of {', '.join(map(str, possible))}, or add the set to data.validation"
        raise ConfigError(f"checkpoint.keep_best={name}: there is no such validation set; {remedy}")
    if every and (not validated or every % validated):
        use = math.ceil(every / validated) * validated if validated else 0
        remedy = f"set checkpoint.every={use}, or " if use else ""
        raise ConfigError(
            f"checkpoint.keep_best={name}: checkpoints between validations have no validation loss, and "
            f"checkpoint.every={every} is not a multiple of train.validate_every={validated}; {remedy}set "
            f"train.validate_every={every}"
        )


def _check_cuda_graphs(config: Config) -> None:
    if not config.train.cuda_graphs:
        return
    if config.data.reset_attention:
        raise ConfigError(
            "train.cuda_graphs=true: data.reset_attention=true gives attention other shapes in each batch; set one of "
            "these keys to false"
        )
    if config.data.source == "chat":
        raise ConfigError(
            "train.cuda_graphs=true: data.source=chat gives attention and loss other shapes and divisors in each "
            "batch; leave it out"
        )
    if config.profile.steps is not None:
        raise ConfigError(
            f"train.cuda_graphs=true: profile.steps={config.profile.steps} records layers, which do not run when a "
            "graph is replayed; leave one of these keys out"
        )


def _check_mode(parallel: ParallelConfig) -> None:
    if parallel.mode == "atp":
        for key, name in (("gx", "d1"), ("gy", "d2")):
            if (size := getattr(parallel, key)) != 1:
                raise ConfigError(
                    f"parallel.{key}={size}: its name in parallel.mode=atp is {name}; use parallel.{name}={size}"
                )
    else:
        for key, name in (("d1", "gx"), ("d2", "gy")):
            if (size := getattr(parallel, key)) is not None:
                raise ConfigError(
                    f"parallel.{key}={size}: belongs to parallel.mode=atp; set that, or use parallel.{name}={size}"
                )


def _check_layers(parallel: ParallelConfig, blocks: int) -> None:
    cached, whole = parallel.cache_layers, parallel.replicated_layers
    if cached not in (None, "all") and not (type(cached) is int and 0 <= cached <= blocks):
        raise ConfigError(f"parallel.cache_layers={cached}: not a number of blocks; use all, or 0 to {blocks}")
    if parallel.cache_scope == "step" and not cached:
        raise ConfigError("parallel.cache_scope=step: no weights are kept; use parallel.cache_layers=all")
    if not 0 <= whole <= blocks:
        raise ConfigError(f"parallel.replicated_layers={whole}: not a number of blocks; use 0 to {blocks}")
