"""Checks of a configuration that need no devices and no process group."""

import itertools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gpt4d.config.composing import CONFIG_DIR, preset
from gpt4d.config.conditions import has_experts
from gpt4d.config.fields import LARGEST, check_at_least, check_limits, command_text, divisors, shortened, value_of
from gpt4d.config.keys import check_allowed, known_keys, stated
from gpt4d.config.length import batch_sizes, ramp_text
from gpt4d.config.schema import (
    HELD_OUT,
    MESH_KEYS,
    ClusterConfig,
    Config,
    GridSizes,
    MuonConfig,
    ParallelConfig,
    TrainConfig,
)
from gpt4d.runtime.errors import ConfigError

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
            remedy = f" ({rule.remedy})" if rule.remedy else ""
            return (
                f"{sizes.product(*rule.axes)}: does not divide {rule.quantity}={rule.extent}; "
                f"use one of {shortened(divisors(rule.extent))}{remedy}"
            )
    if problem := _context_problem(train, parallel, sizes):
        return problem
    shards = sizes.sample_shards(parallel.context)
    for size in batch_sizes(train)[:-1]:
        micro_batch_size = train.micro_batch_size and min(train.micro_batch_size, max(1, size // shards))
        smaller = replace(train, batch_size=size, batch_ramp=None, micro_batch_size=micro_batch_size)
        if problem := grid_problem((), smaller, parallel, sizes):
            return f"train.batch_ramp={ramp_text(train)}: its batch of {size} is not possible: {problem}"
    share, rest = divmod(train.batch_size, shards)
    if rest:
        return (
            f"train.batch_size={train.batch_size}: cannot be split over parallel.{split_samples(parallel)}={shards}; "
            f"use a multiple of {shards}"
        )
    if train.micro_batch_size is not None and share % train.micro_batch_size:
        return (
            f"train.micro_batch_size={train.micro_batch_size}: does not divide a device's share of the batch, "
            f"train.batch_size/({split_samples(parallel)})={share}; use one of {shortened(divisors(share))}"
        )
    if (parallel.pipeline.stages or 1) > 1:
        return None  # gpt4d.config.pipeline decides how large a microbatch is
    return chunk_problem(train, parallel, sizes, train.micro_batch_size or share)


def split_samples(parallel: ParallelConfig) -> str:
    """Return the number of shards of the samples in the user's terms."""
    return "gdata·gz" if parallel.context == 1 else "gdata·gz/context"


def _context_problem(train: TrainConfig, parallel: ParallelConfig, sizes: GridSizes) -> str | None:
    """Return one line that explains why ranks of a grid cannot share sequences; None if they can."""
    context, shards = parallel.context, sizes.batch_shards
    if shards % context:
        return (
            f"parallel.context={context}: does not divide parallel.gdata·gz={shards}; "
            f"use one of {shortened(divisors(shards))}"
        )
    if context > 1 and train.seq_len % (2 * context):
        return (
            f"parallel.context={context}: cuts each sequence into {2 * context} segments, which do not divide "
            f"train.seq_len={train.seq_len}; use a multiple of {2 * context}"
        )
    length = train.seq_len // context
    if context > 1 and length % train.loss_chunks:
        return (
            f"train.loss_chunks={train.loss_chunks}: does not divide train.seq_len/parallel.context={length}; "
            f"use one of {shortened(divisors(length))}"
        )
    return None


def chunk_problem(train: TrainConfig, parallel: ParallelConfig, sizes: GridSizes, micro_batch: int) -> str | None:
    """Return one line that explains why ``micro_batch`` samples cannot be cut into chunks; None if they can."""
    samples, rest = divmod(micro_batch, parallel.chunks)
    if rest:
        return (
            f"parallel.chunks={parallel.chunks}: does not divide a device's microbatch of {micro_batch} sample(s); "
            f"use one of {shortened(divisors(micro_batch))}, or another train.micro_batch_size"
        )
    tokens = samples * train.seq_len // parallel.context
    if parallel.sequence_parallel and tokens % sizes.x:
        key, count = "train.micro_batch_size", share_multiple(train, parallel, sizes)
        if train.micro_batch_size is None:
            key, count = "train.batch_size", count * sizes.sample_shards(parallel.context)
        return (
            f"parallel.sequence_parallel=true: {sizes.product('x')} does not divide the {tokens} tokens of a chunk; "
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
    return parallel.chunks * tokens // math.gcd(tokens, train.seq_len // parallel.context)


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


def check_run(config: Config) -> None:
    """Raise ConfigError unless the name of the run stays inside its directory, and can be printed."""
    name = config.run.name
    if not name.isprintable() or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ConfigError(
            f"run.name={name}: has a part '.', '..' or '', or a character that cannot be printed; use a "
            "plain name, and run.dir for the path of a directory"
        )
    if Path(config.run.dir).resolve() == Path("/"):
        raise ConfigError(f"run.dir={config.run.dir}: the root directory; use a directory for this run")


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
            "with AdamW; use train=finetune, or optim.algorithm=adamw with a lower optim.lr"
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
    data, steps = config.data, config.profile.steps
    for found, problem in (
        (data.reset_attention, "data.reset_attention=true gives attention other shapes in each batch; set one of these "
            "keys to false"),
        (has_experts(config), "the experts of a mixture receive other numbers of tokens in each batch; leave it out"),
        (data.source == "chat", "data.source=chat gives attention and loss other shapes and divisors in each batch; "
            "leave it out"),
        (steps is not None, f"profile.steps={steps} records layers, which do not run when a graph is replayed; leave "
            "one of these keys out"),
    ):  # fmt: skip
        if config.train.cuda_graphs and found:
            raise ConfigError(f"train.cuda_graphs=true: {problem}")


def _check_mode(parallel: ParallelConfig) -> None:
    for key, name in MESH_KEYS.items():
        if parallel.mode == "atp" and (size := getattr(parallel, key)) != 1:
            raise ConfigError(
                f"parallel.{key}={size}: its name in parallel.mode=atp is {name}; use parallel.{name}={size}"
            )
        if parallel.mode != "atp" and (size := getattr(parallel, name)) is not None:
            raise ConfigError(
                f"parallel.{name}={size}: belongs to parallel.mode=atp; set that, or use parallel.{key}={size}"
            )


def _check_layers(parallel: ParallelConfig, blocks: int) -> None:
    cached, whole = parallel.cache_layers, parallel.replicated_layers
    if cached not in (None, "all") and not (type(cached) is int and 0 <= cached <= blocks):
        raise ConfigError(f"parallel.cache_layers={cached}: not a number of blocks; use all, or 0 to {blocks}")
    if parallel.cache_scope == "step" and not cached:
        raise ConfigError("parallel.cache_scope=step: no weights are kept; use parallel.cache_layers=all")
    if not 0 <= whole <= blocks:
        raise ConfigError(f"parallel.replicated_layers={whole}: not a number of blocks; use 0 to {blocks}")


def check_precision(precision: str, cluster: ClusterConfig) -> None:
    """Raise ConfigError if ``train.precision`` needs products that the GPUs of a machine do not have."""
    if precision == "fp8" and cluster.device == "cuda" and cluster.fp8_tflops is None:
        raise ConfigError(
            f"train.precision=fp8: {cluster.name} has no float8 products (cluster.fp8_tflops=null); use "
            "train.precision=bf16, or set the rate of NVIDIA GPUs of compute capability 8.9 or higher"
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Check relations between the settings of a machine. Raises ConfigError for an impossible combination."""
    if cluster.memory_gib is None and cluster.host_gib is None:
        raise ConfigError("cluster.memory_gib=null: the memory of a device is unknown; set it, or cluster.host_gib")
    if not cluster.levels:
        raise ConfigError("cluster.levels=[]: a machine needs a level of links; use [{group_gb_s: 1}], for example")
    for number, level in enumerate(cluster.levels):
        if level.ranks is None and number:
            raise ConfigError(
                f"cluster.levels[{number}].ranks=null: only the outermost level may be open; set the number of its "
                "members"
            )
    for number, entry in enumerate(cluster.measured):
        check_at_least(f"cluster.measured[{number}].local·nodes", entry.local * entry.nodes, 2)
    if cluster.atp_gb_s is not None and not _are_bandwidths(cluster.atp_gb_s):
        raise ConfigError(
            f"cluster.atp_gb_s={cluster.atp_gb_s}: not a map of meshes to two bandwidths; use values above 0, and null "
            "for a dimension of one device: {2x4: [1.2, 4.95], 8x1: [0.97, null]}"
        )


def _are_bandwidths(bandwidths: Any) -> bool:
    if not isinstance(bandwidths, dict):
        return False
    for mesh, pair in bandwidths.items():
        dims = re.fullmatch(r"(\d+)x(\d+)", str(mesh))
        if not dims or not isinstance(pair, list) or len(pair) != 2:
            return False
        for size, bandwidth in zip(map(int, dims.groups()), pair, strict=True):
            if (bandwidth is None) != (size == 1) or (bandwidth is not None and not 0 < bandwidth <= LARGEST):
                return False
    return True


def unused_keys(config: Config) -> dict[str, str]:
    """Return the keys that are set but not read by a run of ``config``, each with the reason and the remedy.

    Every run reads the settings without a condition (``setting(read_if=…)``), or may name them (``data.cache_dir``, the
    machine ``cluster``). A key is set if its value differs from the schema's default. Keys of ``data``, ``model`` and
    ``optim`` must also differ from the value in the chosen file of ``configs/``.
    """
    model = type(config.model)
    default = Config(model=model())
    found = {}
    for key in conditional_keys():
        if _is_set(config, default, key):
            conditions = itertools.chain(*stated(key, "read_if", model))
            if reason := next(filter(None, (condition(config) for condition in conditions)), None):
                found[key] = reason
    return found


def check_unused(config: Config) -> None:
    """Raise ConfigError for the first key that is set but not read by a run of ``config``."""
    for key, reason in unused_keys(config).items():
        raise ConfigError(f"{key}={command_text(value_of(config, key))}: {reason}")


def conditional_keys() -> list[str]:
    """Return the keys that only some configurations read."""
    return [key for key in known_keys() if stated(key, "read_if")]


def _is_set(config: Config, defaults: Config, key: str) -> bool:
    group, _, name = key.partition(".")
    if group == "model" and not hasattr(config.model, name):
        return False
    value: Any = value_of(config, key)
    default = value_of(defaults, key)
    if value == (None if key == "data.tokenizer_vocab" else default):  # interpolated
        return False
    if value in stated(key, "off", type(config.model)):
        return False
    if group == "optim":  # from the model's file, or a file of configs/optim, which the model's file may name
        files = [preset("optim", path.stem) for path in CONFIG_DIR.glob("optim/*.yaml")]
        return all(value != file.get(name) for file in [preset("model", config.model.name, "optim"), *files])
    return group not in ("data", "model") or value != preset(group, getattr(config, group).name).get(name, default)
