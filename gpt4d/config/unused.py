"""Settings that the chosen data source, model, mode or schedule does not read: each is an error, with a remedy.

``_CONDITIONS`` is the one table of such settings. Every run reads the keys without an entry, or may name them
(``data.cache_dir``, the description of the machine ``cluster``).
"""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from gpt4d.config.checks import has_experts
from gpt4d.config.composing import CONFIG_DIR, preset
from gpt4d.config.data_files import blend_paths, is_megatron, is_remote, patterns, tokenizer_file, written_source
from gpt4d.config.fields import ConfigError
from gpt4d.config.schema import Config, MuonConfig
from gpt4d.config.values import value_of

# Why a configuration does not read a key, and the remedy: "reason; remedy". None if it reads the key.
Condition = Callable[[Config], str | None]

_TOKENS = ("tokens", "blend", "megatron")  # sources that are token files already
_CONVERSATIONS = ("chat", "tokens", "blend")  # sources that may contain conversations
_ROWS = ("jsonl", "csv", "parquet", "arrow", "files", "hub")  # sources with columns
# Values that disable a feature. They are accepted even where the feature does not exist.
_OFF = {
    "logging.sample_prompt": "",
    "logging.sample_tokens": 0,
    "logging.sample_images": 0,
    "train.validate_every": 0,
}


def unused_keys(config: Config) -> dict[str, str]:
    """Return the keys that are set but not read by a run of ``config``, each with the reason and the remedy.

    A key is set if its value differs from the schema's default. Keys of ``data``, ``model`` and ``optim`` must also
    differ from the value in the chosen file of ``configs/``.
    """
    reasons = {key: condition(config) for key, condition in _CONDITIONS.items() if _is_set(config, key)}
    return {key: reason for key, reason in reasons.items() if reason}


def check_unused(config: Config) -> None:
    """Raise ConfigError for the first key that is set but not read by a run of ``config``."""
    for key, reason in unused_keys(config).items():
        raise ConfigError(f"{key}={_text(value_of(config, key))}: {reason}")


def conditional_keys() -> list[str]:
    """Return the keys that only some configurations read."""
    return list(_CONDITIONS)


def _is_set(config: Config, key: str) -> bool:
    group, _, name = key.partition(".")
    if group == "model" and not hasattr(config.model, name):
        return False
    value = value_of(config, key)
    default = value_of(Config(model=type(config.model)()), key)
    if value == (None if key == "data.tokenizer_vocab" else default):  # its default is interpolated
        return False
    if key in _OFF and value == _OFF[key]:
        return False
    if group == "optim":  # from the model's file, or a file of configs/optim, which the model's file may name
        files = [preset("optim", path.stem) for path in CONFIG_DIR.glob("optim/*.yaml")]
        return all(value != file.get(name) for file in [preset("model", config.model.name, "optim"), *files])
    return group not in ("data", "model") or value != preset(group, getattr(config, group).name).get(name, default)


def _text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_text(config: Config) -> bool:
    return hasattr(config.model, "vocab_size")


def _trains_on_images(config: Config) -> bool:
    return hasattr(config.model, "timesteps")


def _on_text(config: Config) -> str | None:
    """Return why a model does not read a key of text models; None for text models and models of unknown tasks."""
    return (
        f"model={config.model.name} is trained on images, not on text; leave it out"
        if _trains_on_images(config)
        else None
    )


def _on_images(config: Config) -> str | None:
    return f"model={config.model.name} is trained on text, not on images; leave it out" if _is_text(config) else None


def _any(*conditions: Condition) -> Condition:
    """Return a condition that gives the first reason of several conditions."""
    return lambda config: next(filter(None, (condition(config) for condition in conditions)), None)


def _from(*sources: str) -> Condition:
    """Return the condition of a key that only these values of ``data.source`` read."""

    def condition(config: Config) -> str | None:
        source = config.data.source
        if source in sources:
            return None
        return f"data.source={source} does not read it; leave it out, or set data.source={' or '.join(sources)}"

    return condition


def _before_preparation(config: Config) -> str | None:
    source = config.data.source
    if source not in _TOKENS:
        return None
    return f"data.source={source} was prepared before; leave it out, or set it for python -m gpt4d.data.prepare"


def _paths(config: Config) -> list[str]:
    """Return the expanded paths of a blend; empty for other sources."""
    data = config.data
    return [os.path.expanduser(path) for path in blend_paths(data.blend)] if data.source == "blend" else []


def _is_prepared(config: Config) -> bool:
    """Return whether all data are directories of token files, which have a tokenizer and held-out documents."""
    source = config.data.source
    return source == "tokens" or (source == "blend" and all(map(os.path.isdir, _paths(config))))


def _streamed(config: Config) -> str | None:
    source = config.data.source
    if source in _TOKENS:
        return f"data.source={source} has tokens already; leave it out"
    return "conversations are packed by the lengths of all of them; leave it out" if source == "chat" else None


def _before_splitting(config: Config) -> str | None:
    return _before_preparation(config) if _is_prepared(config) else None


def _without_tokenizer(config: Config) -> str | None:
    reads_megatron = config.data.source == "megatron" or any(map(is_megatron, _paths(config)))
    if config.data.tokenizer or not reads_megatron:
        return None
    return "Megatron's files have no tokenizer; set data.tokenizer to the one that made them"


def _with_path(config: Config) -> str | None:
    data = config.data
    if data.source not in ("sotu", "blue_marble", "blend"):
        return None
    if data.source == "blend":
        return "data.source=blend reads no path; list token directories or Megatron's prefixes in data.blend"
    return f"data.source={data.source} reads no path; add data={_reader(data.path, _trains_on_images(config))}"


def _at_url(config: Config) -> str | None:
    if any(isinstance(path, str) and is_remote(path) for path in patterns(config.data.path)):
        return None
    return f"data.path={config.data.path} has no URL; leave it out"


def _reader(path: Any, pictures: bool) -> str:
    """Return the source that probably reads ``path``."""
    if pictures:
        return "pictures"
    if not isinstance(path, str):
        return "files"
    if is_megatron(path):
        return "megatron"
    return "tokens" if os.path.isdir(os.path.expanduser(path)) else written_source(path)


def _with_tokenizer(config: Config) -> str | None:
    data = config.data
    if not _is_prepared(config) or tokenizer_file(data.tokenizer or "").is_file():  # its companions are read
        return None
    return f"data.source={data.source} has the tokenizer that made its tokens; leave it out"


def _in_stages(config: Config) -> str | None:
    if (config.parallel.pipeline.stages or 1) > 1:
        return None
    return "there is one stage; set parallel.pipeline.stages, or leave it out"


def _in_possible_stages(config: Config) -> str | None:
    is_open = config.parallel.mode == "auto" and config.parallel.pipeline.stages is None
    return None if is_open else _in_stages(config)


def _with_experts(config: Config) -> str | None:
    return None if has_experts(config) else f"model={config.model.name} has no experts; leave it out"


def _on_equal_grids(config: Config) -> str | None:
    given = config.parallel.pipeline.stage_grids
    return None if given is None else "parallel.pipeline.stage_grids has the grid of each stage; leave it out"


def _with_own_head(config: Config) -> str | None:
    if not getattr(config.model, "tied", False):
        return None
    return f"the output head of model={config.model.name} is the token embedding; set the group embeddings"


def _without_adapters(config: Config) -> str | None:
    rank = config.lora.rank
    return f"lora.rank={rank} trains adapters alone; leave it out" if rank else None


def _without_decay_from(config: Config) -> str | None:
    begin = config.optim.decay_from
    return None if begin is None else f"optim.decay_from={begin} decays until the end of the run; leave it out"


def _unless(key: str, *values: Any, remedy: str) -> Condition:
    """Return the condition of a setting that a run ignores while ``key`` has one of ``values``."""

    def condition(config: Config) -> str | None:
        value = value_of(config, key)
        return f"{key}={_text(value)} does not read it; {remedy}" if value in values else None

    return condition


_without_validation = _unless("train.validation_batches", 0, remedy="set train.validation_batches")
_with_minimum = _unless("optim.schedule", "constant", "inverse_sqrt", remedy="set optim.schedule=cosine, linear or wsd")
_below_maximum = _unless("optim.min_lr_ratio", 1, remedy="set optim.min_lr_ratio, such as 0.1")
_in_wsd = _unless("optim.schedule", "cosine", "linear", "constant", "inverse_sqrt", remedy="set optim.schedule=wsd")
_evaluated = _any(_on_text, _unless("evaluate.every", 0, remedy="set evaluate.every, such as 500"))


def _rope(*scalings: str) -> Condition:
    others = {"none", "linear", "llama3", "yarn"} - {*scalings}
    return _unless("model.rope_scaling", *others, remedy=f"set model.rope_scaling={' or '.join(scalings)}")


def _tracked(config: Config) -> str | None:
    if {*config.logging.trackers} - {"tensorboard"}:
        return None
    return f"logging.trackers=[{','.join(config.logging.trackers)}] does not read it; add logging.trackers=[wandb]"


def _of_group(name: str, *conditions: Condition) -> dict[str, Condition]:
    """Return the conditions of the settings of a group of parameters."""
    return dict.fromkeys((f"optim.lr_factors.{name}", f"optim.weight_decays.{name}"), _any(*conditions))


_CONDITIONS: dict[str, Condition] = {
    **dict.fromkeys(
        ("lora.alpha", "lora.targets", "optim.lr_factors.adapters", "optim.weight_decays.adapters"),
        _unless("lora.rank", 0, remedy="leave it out, or set lora.rank"),
    ),
    **_of_group("matrices", _without_adapters),
    **_of_group("embeddings", _without_adapters),
    **_of_group("head", _without_adapters, _with_own_head),
    **_of_group("router", _without_adapters, _with_experts),
    **_of_group("vectors", _without_adapters),
    **dict.fromkeys(
        ("model.base_hidden", "model.base_channels"),
        _unless("optim.width_transfer", False, remedy="set optim.width_transfer=true"),
    ),
    "optim.width_transfer": _without_adapters,
    "optim.validate_averages": _unless("optim.ema_decay", 0, remedy="set optim.ema_decay, such as 0.999"),
    **dict.fromkeys(
        (f"optim.muon.{field.name}" for field in fields(MuonConfig)),
        _unless("optim.algorithm", "adamw", remedy="leave it out, or add optim=muon"),
    ),
    "data.path": _with_path,
    "data.subset": _from("hub"),
    "data.split": _from("hub"),
    "data.column": _from(*_ROWS),
    "data.skip_empty": _any(_on_text, _before_preparation),
    "data.strip": _any(
        _on_text,
        _before_preparation,
        _unless("data.source", "chat", remedy="leave it out"),
    ),
    "data.blend": _from("blend"),
    "data.tokenizer": _any(_on_text, _with_tokenizer),
    "data.tokenizer_vocab": _on_text,
    "data.retry_s": _at_url,
    "data.begin_of_text": _any(
        _on_text, _unless("data.source", "chat", remedy="leave it out, as the chat template renders the first token")
    ),
    "data.chat_template": _from("chat"),
    "data.train_on": _from("chat"),
    "data.skip_long": _from(*_CONVERSATIONS),
    "data.validation_fraction": _before_splitting,
    "data.validation": _any(_on_text, _without_validation, _without_tokenizer),
    "data.stream": _any(_on_text, _streamed),
    "data.flip": _on_images,
    "data.reset_attention": _any(
        _on_text, _unless("data.source", "chat", remedy="leave it out, as attention never crosses conversations")
    ),
    "data.processes": _any(_on_text, _before_preparation),
    **{f"parallel.{axis}": _on_equal_grids for axis in ("gx", "gy", "gz", "gdata")},
    "parallel.expert_data": _with_experts,
    "parallel.context_exchange": _unless("parallel.context", 1, remedy="leave it out, or set parallel.context"),
    "parallel.overlap.prefetch": _unless("parallel.overlap.all_gather", False, remedy="leave it out"),
    **{f"parallel.pipeline.{key}": _in_stages for key in ("cuts", "stage_grids", "chunks_per_stage", "microbatches")},
    "parallel.pipeline.schedule": _in_possible_stages,
    "parallel.pipeline.strategy": _in_possible_stages,
    "train.cuda_graphs": _unless("cluster.device", "cpu", remedy="leave it out"),
    "train.loss_chunks": _on_text,
    "train.z_loss": _on_text,
    "train.validate_every": _without_validation,
    "checkpoint.keep_best": _without_validation,
    "optim.min_lr_ratio": _with_minimum,
    "optim.schedule_steps": _any(_with_minimum, _below_maximum, _without_decay_from),
    "optim.decay_fraction": _any(_in_wsd, _below_maximum, _without_decay_from),
    **dict.fromkeys(("optim.decay_shape", "optim.decay_from"), _any(_in_wsd, _below_maximum)),
    "evaluate.every": _any(_on_text, _without_tokenizer),
    **{f"evaluate.{key}": _evaluated for key in ("tasks", "limit", "num_fewshot", "batch_size", "allow_code")},
    **dict.fromkeys(("logging.project", "logging.online"), _tracked),
    "logging.sample_prompt": _any(
        _on_text, _unless("logging.sample_tokens", 0, remedy="set logging.sample_tokens"), _without_tokenizer
    ),
    "logging.sample_tokens": _any(
        _on_text, _unless("logging.sample_prompt", "", remedy="set logging.sample_prompt"), _without_tokenizer
    ),
    "logging.sample_images": _on_images,
    "logging.sample_steps": _any(_on_images, _unless("logging.sample_images", 0, remedy="set logging.sample_images")),
    "model.rope_factor": _rope("linear", "llama3", "yarn"),
    "model.rope_original_positions": _rope("llama3", "yarn"),
    **{f"model.rope_{key}": _rope("llama3") for key in ("low_frequency", "high_frequency")},
    **{f"model.rope_{key}": _rope("yarn") for key in ("beta_slow", "beta_fast", "truncate", "attention_factor")},
}
