"""Import of a model of transformers or diffusers as a run at step 0, and the commands that continue its training.

Weights are converted tensor by tensor from file to file, so the model need not fit into memory.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gpt4d.checkpoint import adapter_files, checkpoint_dir, lifecycle, storage, tensor_files
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.model_directory import adapter_of, new_directory, read_json
from gpt4d.checkpoint.source_weights import SourceWeights
from gpt4d.config import ConfigError, GridSizes, ModelConfig, compose
from gpt4d.data import hub, tokenizers, transformers_tokenizer
from gpt4d.model import registry
from gpt4d.model.family import HuggingFaceAdapter
from gpt4d.planner.candidates import fewest_microbatches
from gpt4d.planner.options import levels
from gpt4d.planner.topology import for_devices
from gpt4d.task import registry as tasks

_MAX_LENGTH = 1024  # tokens; longer sequences need memory that few machines have


def import_model(
    source: str, run_dir: Path, tokenizer: str | None = None, adapter_dir: str | None = None
) -> ModelConfig:
    """Create ``run_dir`` with a checkpoint of step 0 from a model of transformers or diffusers.

    Args:
        source: a directory, or a name on the Hugging Face hub: a model, or a pipeline of a U-Net and a scheduler.
        run_dir: the directory to create.
        tokenizer: ``none``, or gpt2, a file, a directory or a hub name; None for the tokenizer in ``source``.
        adapter_dir: a directory in which peft has saved adapters of this model; None for a model without adapters.

    Raises ConfigError if gpt4d does not support the model or its adapters, if a language model has no tokenizer, or if
    ``run_dir`` exists.
    """
    directory = _find(source)
    if (directory / "model_index.json").exists():
        scheduler = read_json(f"source={source}", directory / "scheduler" / "scheduler_config.json")
        listed = read_json(f"source={source}", directory / "model_index.json").get("scheduler")
        if isinstance(listed, list) and listed:  # the class that diffusers loads, whose name may differ
            scheduler["_class_name"] = listed[-1]
        directory /= "unet"
        values = read_json(f"source={source}", directory / "config.json") | {"scheduler": scheduler}
    else:
        values = read_json(f"source={source}", directory / "config.json")
    if adapter_dir is None and (directory / adapter_files.SETTINGS).exists():  # transformers also loads these adapters
        raise ConfigError(f"source={source}: contains {adapter_files.SETTINGS}; add adapter={directory}, or remove it")
    family = registry.family_of_hf(values.get("model_type") or values.get("_class_name"))
    adapter = adapter_of(family)
    model = _model(source, values, adapter)
    shapes = storage.shapes(model)
    weights = SourceWeights(directory, values, model, adapter, shapes)
    adapters: dict[str, torch.Tensor] = {}
    if adapter_dir is not None:
        model.lora, adapters = adapter_files.read(Path(os.path.expanduser(adapter_dir)), model)
    identity, documents = {"data": source}, dict[str, bytes]()
    if adapter.HAS_TOKENIZER:
        documents = {
            name: (directory / name).read_bytes() for name in checkpoint_dir.MODEL_FILES if (directory / name).is_file()
        }
        documents |= _read_tokenizer(source, directory, tokenizer, model)
    elif tokenizer not in (None, "none"):
        raise ConfigError(f"tokenizer={tokenizer}: {family.name} reads no text; leave it out")
    if tokenizers.FILE in documents:
        identity["tokenizer"] = hashlib.sha256(documents[tokenizers.FILE]).hexdigest()
    with new_directory(run_dir) as temporary:
        partial = lifecycle.begin(temporary, step=0)
        read = itertools.chain(_read_tensors(weights, shapes, model, adapter), adapters.values())
        all_shapes = shapes | {name: tuple(tensor.shape) for name, tensor in adapters.items()}
        entry, starts = tensor_files.write_values(partial / "imported.bin", read)
        index = {}
        for (name, shape), start in zip(all_shapes.items(), starts, strict=True):
            chunk = tensor_files.Chunk((0,) * len(shape), shape, "imported.bin", start)
            index[f"model.{name}"] = tensor_files.StoredTensor(torch.float32, shape, [chunk]).to_json()
        meta = checkpoint_dir.Meta(checkpoint_dir.Progress(), model, [], family.task, identity)
        documents[checkpoint_dir.META] = meta.to_json()
        tensor_files.complete_directory(partial, [(index, {"imported.bin": entry})], documents)
        lifecycle.commit(partial)
    return model


def _find(source: str) -> Path:
    """Return the directory of a model, downloaded from the hub unless ``source`` is a path."""
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"source={source}: a file; use the directory that contains it")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ConfigError(f"source={source}: no such directory; use a directory, or a hub name such as Qwen/Qwen2-0.5B")
    return _download(source)


def _model(source: str, values: dict[str, Any], adapter: HuggingFaceAdapter) -> ModelConfig:
    """Return gpt4d's settings for a ``config.json``. They pass the same checks as settings of a configuration."""
    try:
        model = adapter.config_from_hf(source, values)
        registry.check_model(model)
    except ConfigError as error:
        raise ConfigError(str(error) if source in str(error) else f"source={source}: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"source={source}: config.json has an invalid value ({problem}); correct that file") from None
    return model


def _read_tensors(
    weights: SourceWeights, shapes: dict[str, tuple[int, ...]], model: ModelConfig, adapter: HuggingFaceAdapter
) -> Iterator[torch.Tensor]:
    """Yield the parameters in order, reading one at a time."""
    for name, shape in shapes.items():
        shaped = adapter.to_hf(name, torch.empty(shape, device="meta"), model)
        keys = adapter.names(name, model)
        tensors = [weights.read(key, tuple(theirs.shape)) for key, theirs in zip(keys, shaped, strict=True)]
        yield adapter.from_hf(name, tensors, shape, model)


def _read_tokenizer(source: str, directory: Path, tokenizer: str | None, model: Any) -> dict[str, bytes]:
    """Return the files of a model's tokenizer by name."""
    if tokenizer == "none":
        return {}
    if not tokenizer and not any(directory.glob("tokenizer*")) and not (directory / "vocab.json").exists():
        raise ConfigError(f"source={source}: no tokenizer; add tokenizer=none, or a file, directory or hub name")
    files = transformers_tokenizer.files_of("tokenizer" if tokenizer else "source", tokenizer or str(directory))
    parsed = tokenizers.parse(files, tokenizer or directory)
    tokens = tokenizers.vocabulary(parsed)
    if tokens > model.vocab_size:
        last = parsed.id_to_token(tokens - 1)
        raise ConfigError(
            f"tokenizer={tokenizer or directory}: its {tokens} tokens are more than the model's {model.vocab_size}; "
            f"use the model's own tokenizer, and name no other token in its settings (here {last})"
        )
    return files


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    problem = hub.unreachable()
    try:
        files = ["*.json", "*.txt", "*.jinja", "*.model", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # The type depends on the cause: no such name, no permission.
        message = problem or " ".join(str(error).split())
        raise ConfigError(f"source={name}: not a directory, and the download from the hub failed ({message})") from None


def commands(imported: Path, model: ModelConfig) -> dict[str, str]:
    """Return the commands that train the import in ``imported`` in a separate run directory, by the kind of data.

    A model with a chat template has a second command, for conversations.
    """
    family = registry.of(model)
    defaults = asdict(type(model)(name=model.name, lora=model.lora, width=model.width))
    changed = {key: value for key, value in asdict(model).items() if value != defaults[key]}
    if not changed:  # A family without any size is not a choice of model.
        changed = {key: getattr(model, key) for key in family.structure}
    settings = [f"model={family.name}", *(f"model.{key}={_as_override(value)}" for key, value in changed.items())]
    if model.lora:
        settings += [f"lora.{key}={_as_override(value)}" for key, value in asdict(model.lora).items()]
    most = getattr(model, "max_positions", None)  # only text models have it
    if most:
        settings.append(f"train.seq_len={min(most, _MAX_LENGTH)}")
    settings += _fitting([*settings, "optim=finetune"])
    files = Checkpoint.open(imported).model_files()
    tokenizer = [f"data.tokenizer={imported}"] if tokenizers.FILE in files else []
    task = tasks.get(family.task)
    choices = {task.data: ["optim=finetune", task.own_data]}
    if tokenizer and transformers_tokenizer.load(files, imported).chat_template:
        choices["conversations"] = ["train=finetune", "data=chat data.path='…'"]
    start = f"python train.py checkpoint.init={imported} run.dir={imported}-finetuned"
    return {kind: " ".join([start, *settings, *choice, *tokenizer]) for kind, choice in choices.items()}


def first_tokens(imported: Path) -> str:
    """Return the tokens that the tokenizer of an import puts before a text; empty if it adds none."""
    files = Checkpoint.open(imported).model_files()
    if tokenizers.FILE not in files:
        return ""
    tokenizer = tokenizers.parse(files, imported)
    return " ".join(str(tokenizer.id_to_token(token)) for token in tokenizers.first_tokens(tokenizer))


def _fitting(settings: list[str]) -> list[str]:
    """Return overrides with which a step fits on one device: the microbatch and, if necessary, recomputation."""
    for recomputation in ([], ["train.activation_checkpointing=full"]):
        config = compose([*settings, *recomputation])
        config = replace(config, cluster=for_devices(config.cluster, 1))
        if step := fewest_microbatches(levels(config)[0], (GridSizes(),)):
            break
    micro_batch = config.train.batch_size // step.microbatches if step else 1
    share = [] if micro_batch == config.train.batch_size else [f"train.micro_batch_size={micro_batch}"]
    return [*recomputation, *share]


def _as_override(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None:
        return "null"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
