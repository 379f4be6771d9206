"""Conditions under which a run reads a setting, for ``setting(read_if=…)``, with the reasons why it does not."""

import os
from collections.abc import Callable
from typing import Any

from gpt4d.config.data_files import (
    PREPARED,
    blend_paths,
    is_megatron,
    is_remote,
    patterns,
    tokenizer_file,
    written_source,
)
from gpt4d.config.fields import Condition, command_text, value_of

_MADE_BEFORE = (
    "data.source={0.data.source} was prepared before; leave it out, or set it for python -m gpt4d.data.prepare"
)
_ONE_STAGE = "there is one stage; set parallel.pipeline.stages, or leave it out"


def if_true(test: Callable[[Any], Any], otherwise: str) -> Condition:
    """Return the condition ``test``. In its reason ``otherwise``, {0.data.source} stands for the value of that key."""
    return lambda config: None if test(config) else otherwise.format(config)


def unless(key: str, *values: Any, remedy: str) -> Condition:
    """Return the condition that ``key`` has none of ``values``."""

    def condition(config: Any) -> str | None:
        value = value_of(config, key)
        return f"{key}={command_text(value)} does not read it; {remedy}" if value in values else None

    return condition


def from_sources(*sources: str) -> Condition:
    """Return the condition that ``data.source`` is one of ``sources``."""
    reason = "data.source={0.data.source} does not read it; leave it out, or set data.source=" + " or ".join(sources)
    return if_true(lambda config: config.data.source in sources, reason)


def trains_on_images(config: Any) -> bool:
    """Return whether the model is trained by diffusion."""
    return hasattr(config.model, "timesteps")


def has_experts(config: Any) -> bool:
    """Return whether the model is a mixture of experts."""
    return hasattr(config.model, "experts")


def _blended(config: Any) -> list[str]:
    """Return the expanded paths of a blend; empty for other sources."""
    data = config.data
    return [os.path.expanduser(path) for path in blend_paths(data.blend)] if data.source == "blend" else []


def _is_prepared(config: Any) -> bool:
    """Return whether all data are directories of token files, which have a tokenizer and held-out documents."""
    source = config.data.source
    return source == "tokens" or (source == "blend" and all(map(os.path.isdir, _blended(config))))


def with_path(config: Any) -> str | None:
    """Condition of ``data.path``, whose remedy is the source that probably reads the path."""
    data, path = config.data, config.data.path
    if data.source not in ("sotu", "blue_marble", "blend"):
        return None
    if data.source == "blend":
        return "data.source=blend reads no path; list token directories or Megatron's prefixes in data.blend"
    if trains_on_images(config):
        reader = "pictures"
    elif not isinstance(path, str):
        reader = "files"
    elif is_megatron(path):
        reader = "megatron"
    else:
        reader = "tokens" if os.path.isdir(os.path.expanduser(path)) else written_source(path)
    return f"data.source={data.source} reads no path; add data={reader}"


def tracked(config: Any) -> str | None:
    """Condition of the settings that TensorBoard lacks and all other trackers have."""
    if {*config.logging.trackers} - {"tensorboard"}:
        return None
    return f"logging.trackers=[{','.join(config.logging.trackers)}] does not read it; add logging.trackers=[wandb]"


# A model of an unknown task reads the settings of text and of images.
on_text = if_true(
    lambda config: not trains_on_images(config),
    "model={0.model.name} is trained on images, not on text; leave it out",
)
on_images = if_true(
    lambda config: not hasattr(config.model, "vocab_size"),
    "model={0.model.name} is trained on text, not on images; leave it out",
)
with_experts = if_true(has_experts, "model={0.model.name} has no experts; leave it out")
with_own_head = if_true(
    lambda config: not getattr(config.model, "tied", False),
    "the output head of model={0.model.name} is the token embedding; set the group embeddings",
)
from_rows = from_sources("jsonl", "csv", "parquet", "arrow", "files", "hub")
from_conversations = from_sources("chat", "tokens", "blend")
from_chat = from_sources("chat")
from_hub = from_sources("hub")
at_url = if_true(
    lambda config: any(isinstance(path, str) and is_remote(path) for path in patterns(config.data.path)),
    "data.path={0.data.path} has no URL; leave it out",
)
before_preparation = if_true(lambda config: config.data.source not in PREPARED, _MADE_BEFORE)
before_splitting = if_true(lambda config: not _is_prepared(config), _MADE_BEFORE)
before_tokens = if_true(
    lambda config: config.data.source not in PREPARED, "data.source={0.data.source} has tokens already; leave it out"
)
before_packing = if_true(
    lambda config: config.data.source != "chat",
    "conversations are packed by the lengths of all of them; leave it out",
)
before_template = unless("data.source", "chat", remedy="leave it out, as the chat template renders the first token")
across_documents = unless("data.source", "chat", remedy="leave it out, as attention never crosses conversations")
with_other_tokenizer = if_true(
    # A file is read for its companions.
    lambda config: not _is_prepared(config) or tokenizer_file(config.data.tokenizer or "").is_file(),
    "data.source={0.data.source} has the tokenizer that made its tokens; leave it out",
)
with_tokenizer = if_true(
    lambda config: (
        config.data.tokenizer or not (config.data.source == "megatron" or any(map(is_megatron, _blended(config))))
    ),
    "Megatron's files have no tokenizer; set data.tokenizer to the one that made them",
)
in_stages = if_true(lambda config: (config.parallel.pipeline.stages or 1) > 1, _ONE_STAGE)
in_possible_stages = if_true(  # mode=auto may choose several
    lambda config: (config.parallel.pipeline.stages or 1 + (config.parallel.mode == "auto")) > 1, _ONE_STAGE
)
on_equal_grids = if_true(
    lambda config: config.parallel.pipeline.stage_grids is None,
    "parallel.pipeline.stage_grids has the grid of each stage; leave it out",
)
without_adapters = if_true(
    lambda config: not config.lora.rank, "lora.rank={0.lora.rank} trains adapters alone; leave it out"
)
with_adapters = unless("lora.rank", 0, remedy="leave it out, or set lora.rank")
with_tokens = unless("logging.sample_tokens", 0, remedy="set logging.sample_tokens")
with_prompt = unless("logging.sample_prompt", "", remedy="set logging.sample_prompt")
validated = unless("train.validation_batches", 0, remedy="set train.validation_batches")
evaluated = unless("evaluate.every", 0, remedy="set evaluate.every, such as 500")
with_muon = unless("optim.algorithm", "adamw", remedy="leave it out, or add optim=muon")
with_base = unless("optim.width_transfer", False, remedy="set optim.width_transfer=true")
with_minimum = unless("optim.schedule", "constant", "inverse_sqrt", remedy="set optim.schedule=cosine, linear or wsd")
with_decay = unless("optim.min_lr_ratio", 1, remedy="set optim.min_lr_ratio, such as 0.1")
in_wsd = (
    unless("optim.schedule", "cosine", "linear", "constant", "inverse_sqrt", remedy="set optim.schedule=wsd"),
    with_decay,
)
without_decay_from = if_true(
    lambda config: config.optim.decay_from is None,
    "optim.decay_from={0.optim.decay_from} decays until the end of the run; leave it out",
)
