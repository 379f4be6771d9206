"""Conversion of checkpoints to and from model directories of transformers and diffusers.

Both directions copy tensor by tensor from file to file, so the model need not fit into memory.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, storage, verifying
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.data import hub
from gpt4d.data.tokenizers import companions, end_of_text
from gpt4d.files import sync
from gpt4d.model import registry
from gpt4d.model.family import Family, HuggingFaceAdapter

# Size of a safetensors file, and of what is in memory at once: at least the first, or the largest tensor.
_SMALLEST_SHARD, _LARGEST_SHARD = 64 << 20, 2 << 30
_INDEX = ".safetensors.index.json"


def export(checkpoint: Path, out: Path, shard_bytes: int | None = None) -> None:
    """Write a checkpoint's model, and its tokenizer if it has one, for transformers or diffusers.

    ``shard_bytes``: most bytes of a file of several tensors; None: about those of the largest tensor. Raises
    ConfigError if ``out`` exists or neither library has such models.
    """
    files, model = verifying.verify(checkpoint), checkpoint_dir.Meta.read(checkpoint).model
    adapter = adapter_of(registry.of(model))
    with _new_directory(out) as directory:
        own = [name for name in files.tensors if name.startswith("model.")]
        largest = max(files.tensors[name].nbytes for name in own)
        shards = _group_by_size(own, files, shard_bytes or min(max(largest, _SMALLEST_SHARD), _LARGEST_SHARD))
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            single = len(shards) == 1
            file = f"{adapter.FILE}{'' if single else f'-{number:05}-of-{len(shards):05}'}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                ours = name.removeprefix("model.")
                theirs = adapter.to_hf(ours, files.global_tensor(name), model)
                tensors |= zip(adapter.names(ours, model), theirs, strict=True)
            save_file(tensors, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            total = sum(files.tensors[n].nbytes for names in shards for n in names)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / f"{adapter.FILE}{_INDEX}").write_text(json.dumps(index, indent=1) + "\n")
        _export_config(checkpoint, directory, model, adapter)


def adapter_of(family: Family) -> HuggingFaceAdapter:
    """Return the family's adapter. Raises ConfigError if it has none."""
    if family.hugging_face is None:
        raise ConfigError(
            f"model family {family.name}: transformers and diffusers have no such models; train with gpt4d itself"
        )
    return family.hugging_face()


def _group_by_size(names: list[str], files: storage.Files, max_bytes: int) -> list[list[str]]:
    """Split the names in order into groups of at most ``max_bytes``, or of one larger tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        size += files.tensors[name].nbytes
        if groups[-1] and size > max_bytes:
            groups.append([])
            size = files.tensors[name].nbytes
        groups[-1].append(name)
    return groups


def _export_config(checkpoint: Path, directory: Path, model: ModelConfig, adapter: HuggingFaceAdapter) -> None:
    from transformers import PreTrainedTokenizerFast

    if not (checkpoint / checkpoint_dir.TOKENIZER).exists():
        adapter.hf_config(model).save_pretrained(directory)
        return
    tokenizer = Tokenizer.from_file(str(checkpoint / checkpoint_dir.TOKENIZER))
    end = end_of_text(tokenizer)
    config = adapter.hf_config(model, end)
    config.save_pretrained(directory)
    if files := companions(checkpoint):  # those of an imported model stay as they are
        files[checkpoint_dir.TOKENIZER] = (checkpoint / checkpoint_dir.TOKENIZER).read_bytes()
        for name, content in files.items():
            (directory / name).write_bytes(content)
        return
    special = dict.fromkeys(("bos_token", "eos_token"), tokenizer.id_to_token(end))
    length = config.max_position_embeddings
    exported = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special)
    exported.save_pretrained(directory)


def import_model(source: str, run_dir: Path) -> ModelConfig:
    """Create ``run_dir`` with a checkpoint of step 0 from a model in a directory or on the Hugging Face hub.

    Raises ConfigError if gpt4d does not support the model, or if ``run_dir`` exists.
    """
    directory = Path(source) if Path(source).is_dir() else _download(source)
    try:
        values = dict(json.loads((directory / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"source={source}: no readable config.json ({error})") from None
    family = registry.family_of_hf(cast(str, values.get("model_type") or values.get("_class_name")))
    adapter = adapter_of(family)
    model = adapter.config_from_hf(source, values)
    identity, documents = {"data": source}, dict[str, bytes]()
    if adapter.HAS_TOKENIZER:
        tokenizer = _read_tokenizer(directory)
        identity["tokenizer"] = hashlib.sha256(tokenizer).hexdigest()
        documents = {checkpoint_dir.TOKENIZER: tokenizer} | companions(directory)
    with _new_directory(run_dir) as temporary:
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


def _read_tokenizer(directory: Path) -> bytes:
    """Return ``tokenizer.json``, converted from an older tokenizer format if that file is missing."""
    from transformers import AutoTokenizer

    try:
        path = directory / checkpoint_dir.TOKENIZER
        text = (
            path.read_text() if path.exists() else AutoTokenizer.from_pretrained(directory).backend_tokenizer.to_str()
        )
        end_of_text(Tokenizer.from_str(text))
    except Exception as error:  # The libraries have no exception class of their own.
        raise ConfigError(f"{directory}: no usable tokenizer ({error})") from None
    return text.encode()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    problem = hub.unreachable()
    try:
        files = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # Many kinds: no such name, no permission.
        message = problem or " ".join(str(error).split())
        raise ConfigError(f"source={name}: not a directory, and the download from the hub failed ({message})") from None


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to ``path`` on success. Raises ConfigError if ``path`` exists."""
    if path.exists():
        raise ConfigError(f"out={path}: exists; choose another name or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            directory = Path(temporary) / path.name
            directory.mkdir()
            yield directory
            for file in directory.rglob("*"):
                sync(file)
            sync(directory)
            directory.rename(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.filename or ''}: {error.strerror or error}") from None
