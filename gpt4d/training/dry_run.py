"""``train.py --dry-run``: checks and predictions that are possible without starting a run. No torch here."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt4d.checkpoint.space import check_space, readable_size
from gpt4d.config import (
    PREPARED,
    Config,
    ConfigError,
    blend_paths,
    is_megatron,
    is_remote,
    matching_files,
    patterns,
    tokenizer_file,
    value_of,
)
from gpt4d.data.corpus_files import corpus_files
from gpt4d.data.megatron import Index
from gpt4d.model import registry
from gpt4d.planner import tables
from gpt4d.planner.duration import batch_text, duration
from gpt4d.planner.published import published_lines
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.topology import total_gib, usable_gib

_FILES = ("text", "jsonl", "csv", "parquet", "arrow", "files", "chat", "pictures")  # sources that are globs of files


def dry_arguments(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments with ``run.dry=true`` for ``--dry-run``. Raises ConfigError for a sweep."""
    if "--dry-run" not in arguments:
        return list(arguments)
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("--dry-run: a sweep has several runs; leave out -m and give one value for each key")
    return [*(argument for argument in arguments if argument != "--dry-run"), "run.dry=true"]


def report(plan: PlanEstimate, config: Config, origins: Mapping[str, str]) -> str:
    """Return a readable description of a run of ``plan``.

    Args:
        plan: the plan of the run.
        config: the configuration before its resolution.
        origins: the origin of each value that follows from a file, by its key.

    Raises ConfigError if data cannot be read, or if the disk has no space for the first checkpoint.
    """
    lines = [
        ("run", f"{config.run.dir}: {config.model.name}, {plan.description.size}, {batch_text(config)}"),
        *(("from", f"{key}={value_of(config, key)}: {origin}") for key, origin in origins.items()),
        ("data", "; ".join(_data(config))),
        ("grid", f"{plan.grid} (x, y, z, data) on {plan.devices} device(s) of {config.cluster.name}{_chosen(plan)}"),
        ("memory", _memory(plan)),
        ("time", f"{tables.plan_line(plan)}"),
        ("", str(duration(config, plan.devices, plan.step_time_s))),
        *(("", line) for line in published_lines(plan, config)),
        ("rates", tables.rates_text(config.cluster, plan.devices)),
        ("disk", str(check_space(plan))),
    ]
    text = "\n".join(f"{name:7} {value}" for name, value in lines)
    return f"{text}\nThis was a dry run: nothing was started or written. Remove --dry-run to train."


def _chosen(plan: PlanEstimate) -> str:
    parts = [f"microbatches {plan.microbatches}"]
    if len(plan.stages) > 1:
        parts.append(f"schedule {plan.config.parallel.pipeline.schedule}")
    if plan.config.parallel.cache_layers:
        parts.append("gathered weights are kept")
    return f"; {', '.join(parts)}"


def _memory(plan: PlanEstimate) -> str:
    cluster, needed = plan.config.cluster, plan.memory_gib
    parts = ", ".join(f"{kind} {gib:.3g}" for kind, gib in plan.memory.items())
    text = f"{needed:.4g} of {total_gib(cluster):.4g} GiB of a device ({parts})"
    return f"{text}; less than cluster.margin={cluster.margin:g} is free" if needed > usable_gib(cluster) else text


def _data(config: Config) -> Iterator[str]:
    """Yield descriptions of the data of a run. Raises ConfigError for a file that cannot be read."""
    data = config.data
    if data.source in _FILES:
        yield f"{data.source}: {_files('data.path', data.path, folders=data.source == 'pictures')}"
    elif data.source in PREPARED:
        directories = blend_paths(data.blend) if data.source == "blend" else [data.path or ""]
        for directory in directories:
            if is_megatron(directory):
                yield f"megatron: {_megatron(directory)}"
                continue
            files = set(Path(os.path.expanduser(directory)).glob("train_*.tokens"))
            if not files:
                raise ConfigError(f"data.{'blend' if data.source == 'blend' else 'path'}={directory}: no token files; "
                                  "write them with python -m gpt4d.data.prepare")  # fmt: skip
            yield f"tokens: {directory}, {readable_size(sum(path.stat().st_size for path in files))}"
    elif data.source == "hub":
        yield f"hub: {data.path}, which is downloaded first unless it is in the hub's cache"
    else:
        yield f"{data.source}, from its Python package"
    if registry.of(config.model).unit == "tokens" and (data.tokenizer or data.source not in PREPARED):
        yield _tokenizer(config)
    for name, path in (data.validation or {}).items():
        if os.path.isdir(os.path.expanduser(path)):
            yield f"validation set {name}: {path}"
        else:
            text = _megatron(path) if is_megatron(path) else _files(f"data.validation.{name}", path)
            yield f"validation set {name}: {text}"


def _megatron(prefix: str) -> str:
    """Return the size of Megatron's files. Raises ConfigError for files that cannot be read."""
    index = Index.read(os.path.expanduser(prefix))
    return f"{prefix}, {len(index.bounds) - 1:,} documents of {index.bounds[-1]:,} tokens"


def _files(key: str, path: Any, folders: bool = False) -> str:
    """Return number and size of the files that globs match. Raises ConfigError for a file that cannot be read."""
    local = [pattern for pattern in patterns(path) if not is_remote(pattern)]
    files = {path.resolve() for pattern in local for path in matching_files(pattern, folders)}
    for file in sorted(files):
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{key}={path}: {file} cannot be read; check its permissions")
    remote = corpus_files(filter(is_remote, patterns(path)))
    size = sum(file.stat().st_size for file in files) + sum(file.size for file in remote)
    return f"{len(files) + len(remote):,} file(s), {readable_size(size)}"


def _tokenizer(config: Config) -> str:
    name = config.data.tokenizer
    if name is None:
        vocabulary = config.data.tokenizer_vocab
        return f"a tokenizer of up to {vocabulary:,} tokens is trained on the corpus, or read from the cache"
    if name.endswith(".json") or tokenizer_file(name).is_file():
        return f"tokenizer {tokenizer_file(name)}"
    return f"tokenizer {name}"
