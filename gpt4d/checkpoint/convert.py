"""Checkpoints to and from directories that ``AutoModelForCausalLM.from_pretrained`` loads.

Both ways tensor by tensor, straight from file to file: the model need not fit into memory.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, storage, verifying
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.data.tokenizers import end_of_text
from gpt4d.files import sync
from gpt4d.model import hf

_SHARD_BYTES = 2 << 30  # of a safetensors file; as much is in memory at once
_INDEX = "model.safetensors.index.json"


def export(checkpoint: Path, out: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Writes a checkpoint's model and tokenizer as transformers has them. ConfigError if ``out`` exists."""
    files, meta = verifying.verify(checkpoint), checkpoint_dir.Meta.read(checkpoint)
    with _new_directory(out) as directory:
        shards = _filled([n for n in files.tensors if n.startswith("model.")], files, shard_bytes)
        place = {}
        for number, names in enumerate(shards, 1):
            whole = len(shards) == 1
            file = "model.safetensors" if whole else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for name in names:
                ours = name.removeprefix("model.")
                tensors[hf.hf_name(ours)] = hf.export_tensor(ours, files.whole(name), meta.model)
            save_file(tensors, directory / file, {"format": "pt"})
            place |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            total = sum(files.tensors[n].nbytes for names in shards for n in names)
            index = {"metadata": {"total_size": total}, "weight_map": place}
            (directory / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
        _export_tokenizer(checkpoint, directory, meta.model)


def _filled(names: list[str], files: storage.Files, most: int) -> list[list[str]]:
    """The names in order, in groups of at most so many bytes, or of one."""
    groups, size = [[]], 0
    for name in names:
        size += files.tensors[name].nbytes
        if groups[-1] and size > most:
            groups.append([])
            size = files.tensors[name].nbytes
        groups[-1].append(name)
    return groups


def _export_tokenizer(checkpoint: Path, directory: Path, model: ModelConfig) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(checkpoint / checkpoint_dir.TOKENIZER))
    end = end_of_text(tokenizer)
    hf.hf_config(model, end).save_pretrained(directory)
    ends = dict.fromkeys(("bos_token", "eos_token"), tokenizer.id_to_token(end))
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=model.max_positions, **ends)
    theirs.save_pretrained(directory)


def import_model(source: str, run_dir: Path) -> ModelConfig:
    """Makes ``run_dir``, with a checkpoint of step 0, of a GPT-2 in a directory or on the Hugging Face hub.

    ConfigError if it is no GPT-2 that gpt4d computes alike, or ``run_dir`` exists.
    """
    directory = Path(source) if Path(source).is_dir() else _downloaded(source)
    try:
        values = dict(json.loads((directory / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"source={source}: no config.json that can be read ({error})") from None
    model = hf.model_config(source, values)
    tokenizer = _tokenizer(directory)
    with _new_directory(run_dir) as made:
        partial = checkpoint_dir.begin(made, step=0)
        partial.mkdir()
        wanted = verifying.shapes(model)
        entry, starts = storage.write_values(partial / "imported.bin", _tensors(directory, wanted, model))
        tensors = {}
        for (name, shape), start in zip(wanted.items(), starts, strict=True):
            chunk = storage.Chunk((0,) * len(shape), shape, "imported.bin", start)
            tensors[f"model.{name}"] = storage.StoredTensor(torch.float32, shape, [chunk])
        fingerprint = hashlib.sha256(tokenizer).hexdigest()
        meta = checkpoint_dir.Meta(checkpoint_dir.Progress(), model, {}, source, fingerprint)
        documents = {checkpoint_dir.META: meta.to_json(), checkpoint_dir.TOKENIZER: tokenizer}
        storage.describe(partial, tensors, documents, {"imported.bin": entry})
        checkpoint_dir.commit(partial)
    return model


def _tensors(directory: Path, wanted: dict[str, tuple[int, ...]], model: ModelConfig) -> Iterator[torch.Tensor]:
    """The parameters, in order, each read when its turn comes. ConfigError if one is missing or of another shape."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no *.safetensors; save the model anew with a recent transformers")
    try:
        opened = [safe_open(file, framework="pt") for file in files]
    except SafetensorError as error:
        raise ConfigError(f"{directory}: a *.safetensors file is damaged ({error})") from None
    where = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 – not a dict
    for name, shape in wanted.items():
        theirs = hf.hf_name(name)
        if theirs not in where:  # a GPT2Model was saved, without the head around it
            theirs = theirs.removeprefix("transformer.")
        expected = list(hf.export_tensor(name, torch.empty(shape, device="meta"), model).shape)
        found = where[theirs].get_slice(theirs).get_shape() if theirs in where else None
        if found != expected:
            raise ConfigError(f"{directory}: {theirs} is to be of shape {expected}, but is {found or 'missing'}")
        yield hf.import_tensor(name, where[theirs].get_tensor(theirs).float(), shape)


def _tokenizer(directory: Path) -> bytes:
    """``tokenizer.json``, made of an older kind of tokenizer's files if there is none."""
    from transformers import AutoTokenizer

    try:
        path = directory / checkpoint_dir.TOKENIZER
        text = (
            path.read_text() if path.exists() else AutoTokenizer.from_pretrained(directory).backend_tokenizer.to_str()
        )
        end_of_text(Tokenizer.from_str(text))
    except Exception as error:  # the libraries have no kind of their own
        raise ConfigError(f"{directory}: no tokenizer there that can be used ({error})") from None
    return text.encode()


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.safetensors"]))
    except Exception as error:  # of many kinds: no such name, no network, no permission
        words = " ".join(str(error).split())
        raise ConfigError(f"source={name}: neither a directory nor to be had from the hub ({words})") from None


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """A directory that appears under its name only once it is whole. ConfigError if there is one."""
    if path.exists():
        raise ConfigError(f"out={path}: exists; choose another name, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            made = Path(temporary) / path.name
            made.mkdir()
            yield made
            for file in made.rglob("*"):
                sync(file)
            sync(made)
            made.rename(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.filename or ''}: {error.strerror or error}") from None
