"""Import of a model of transformers or diffusers as a run at step 0.

Weights are converted tensor by tensor from file to file, so the model need not fit into memory.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, storage, verifying
from gpt4d.checkpoint.model_directory import adapter_of, new_directory
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.data import hub, tokenizers
from gpt4d.model import registry
from gpt4d.model.family import HuggingFaceAdapter


def import_model(source: str, run_dir: Path, tokenizer: str | None = None) -> ModelConfig:
    """Create ``run_dir`` with a checkpoint of step 0 from a model of transformers or diffusers.

    Args:
        source: a directory, or a name on the Hugging Face hub: a model, or a pipeline of a U-Net and a scheduler.
        run_dir: the directory to create.
        tokenizer: ``none``, or gpt2, a file, a directory or a hub name; None for the tokenizer in ``source``.

    Raises ConfigError if gpt4d does not support the model, if a language model has no tokenizer, or if ``run_dir``
    exists.
    """
    directory = _find(source)
    if (directory / "model_index.json").exists():
        scheduler = _read_json(source, directory / "scheduler" / "scheduler_config.json")
        directory /= "unet"
        values = _read_json(source, directory / "config.json") | {"scheduler": scheduler}
    else:
        values = _read_json(source, directory / "config.json")
    family = registry.family_of_hf(cast(str, values.get("model_type") or values.get("_class_name")))
    adapter = adapter_of(family)
    model = adapter.config_from_hf(source, values)
    identity, documents = {"data": source}, dict[str, bytes]()
    if adapter.HAS_TOKENIZER:
        documents = {
            name: (directory / name).read_bytes() for name in checkpoint_dir.MODEL_FILES if (directory / name).exists()
        }
        documents |= _read_tokenizer(source, directory, tokenizer, model)
    elif tokenizer not in (None, "none"):
        raise ConfigError(f"tokenizer={tokenizer}: {family.name} reads no text; leave it out")
    if tokenizers.FILE in documents:
        identity["tokenizer"] = hashlib.sha256(documents[tokenizers.FILE]).hexdigest()
    with new_directory(run_dir) as temporary:
        partial = checkpoint_dir.begin(temporary, step=0)
        partial.mkdir()
        shapes = verifying.shapes(model)
        entry, starts = storage.write_values(partial / "imported.bin", _read_tensors(directory, shapes, model, adapter))
        tensors = {}
        for (name, shape), start in zip(shapes.items(), starts, strict=True):
            chunk = storage.Chunk((0,) * len(shape), shape, "imported.bin", start)
            tensors[f"model.{name}"] = storage.StoredTensor(torch.float32, shape, [chunk])
        meta = checkpoint_dir.Meta(checkpoint_dir.Progress(), model, [], family.task, identity)
        documents[checkpoint_dir.META] = meta.to_json()
        storage.complete_directory(partial, tensors, documents, {"imported.bin": entry})
        checkpoint_dir.commit(partial)
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


def _read_json(source: str, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"source={source}: no readable {path.name} ({error})") from None


def _read_tensors(
    directory: Path, shapes: dict[str, tuple[int, ...]], model: ModelConfig, adapter: HuggingFaceAdapter
) -> Iterator[torch.Tensor]:
    """Yield the parameters in order, reading one at a time. Raises ConfigError for a missing tensor or wrong shape."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no *.safetensors; save the model again with a recent transformers")
    try:
        opened = [safe_open(file, framework="pt") for file in files]
    except SafetensorError as error:
        raise ConfigError(f"{directory}: a *.safetensors file is damaged ({error})") from None
    file_of = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 – not a dict
    for name, shape in shapes.items():
        tensors = []
        shaped = adapter.to_hf(name, torch.empty(shape, device="meta"), model)
        for key, theirs in zip(adapter.names(name, model), shaped, strict=True):
            if key not in file_of:
                # A base model that was saved without its head has names without the first component.
                key = key.partition(".")[2]
            expected, actual = list(theirs.shape), file_of[key].get_slice(key).get_shape() if key in file_of else None
            if actual != expected:
                raise ConfigError(f"{directory}: {key} must be of shape {expected}, but is {actual or 'missing'}")
            tensors.append(file_of[key].get_tensor(key).float())
        yield adapter.from_hf(name, tensors, shape, model)


def _read_tokenizer(source: str, directory: Path, tokenizer: str | None, model: Any) -> dict[str, bytes]:
    """Return the files of a model's tokenizer by name."""
    if tokenizer == "none":
        return {}
    if not tokenizer and not any(directory.glob("tokenizer*")) and not (directory / "vocab.json").exists():
        raise ConfigError(f"source={source}: no tokenizer; add tokenizer=none, or a file, directory or hub name")
    files = tokenizers.load("tokenizer" if tokenizer else "source", tokenizer or str(directory))
    tokens = tokenizers.vocabulary(Tokenizer.from_buffer(files[tokenizers.FILE]))
    if tokens > model.vocab_size:
        raise ConfigError(
            f"tokenizer={tokenizer or directory}: its {tokens} tokens are more than the model's {model.vocab_size}; "
            "use the model's own tokenizer"
        )
    return files


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    problem = hub.unreachable()
    try:
        files = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # Many kinds: no such name, no permission.
        message = problem or " ".join(str(error).split())
        raise ConfigError(f"source={name}: not a directory, and the download from the hub failed ({message})") from None
