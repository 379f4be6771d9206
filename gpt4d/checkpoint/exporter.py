"""Export of a checkpoint to a directory for transformers or diffusers.

Weights are converted file by file, so a process holds at most one file of weights in memory.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import ModelCardData, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer

import gpt4d
from gpt4d.checkpoint import adapter_files, checkpoint_dir, storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.model_directory import adapter_of, new_directory
from gpt4d.checkpoint.tensor_files import Files
from gpt4d.config import ConfigError, ModelConfig, check_choice
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.model import registry
from gpt4d.model.family import HuggingFaceAdapter
from gpt4d.runs import starts
from gpt4d.runtime.files import read_json_lines, required_file
from gpt4d.task.averages import PREFIX

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MODEL_SETTINGS, _GENERATION_SETTINGS = checkpoint_dir.MODEL_FILES


def export(
    checkpoint: Checkpoint,
    out: Path,
    dtype: str | None = None,
    weights: str | None = None,
    max_file_size: str = "5GB",
) -> str:
    """Write a checkpoint's model, and its tokenizer if present, for transformers or diffusers.

    Args:
        checkpoint: the checkpoint, which is verified first.
        out: directory to create.
        dtype: float32, bfloat16 or float16; None for the dtype of the model that was imported, otherwise float32.
        weights: ``average`` or ``raw``; None for the averages from which samples are drawn, if the checkpoint has any.
        max_file_size: maximum size of a file of weights.

    Returns a description of the exported weights. Raises ConfigError if ``out`` exists, the weights do not fit the
    dtype, or neither library has such models.
    """
    storage.verify(checkpoint)
    files, meta, path = checkpoint.files, checkpoint.meta, checkpoint.path
    adapter = adapter_of(registry.of(meta.model))
    stored = checkpoint.model_files()
    source = _parse_json(stored, _MODEL_SETTINGS, path)
    tokenizer = _tokenizer(stored, path, meta.model)
    dtype = dtype or source.get("dtype") or source.get("torch_dtype") or "float32"
    check_choice("dtype", dtype, tuple(DTYPES))
    prefix = _weights_prefix(files, weights)
    with new_directory(out) as directory:
        documents = adapter.documents(meta.model, source)
        if tokenizer:
            if not source:  # An imported model keeps its own ids.
                documents[_MODEL_SETTINGS] |= _special_token_ids(tokenizer, stored)
            length, former_length = cast(Any, meta.model).max_positions, source.get("max_position_embeddings")
            transformers_tokenizer.write(tokenizer, stored, directory, length, former_length)
        if adapter.HAS_TOKENIZER:
            keys = {"dtype", "torch_dtype"} & source.keys() or {"dtype"}
            documents[_MODEL_SETTINGS] |= dict.fromkeys(keys, dtype)
            _export_generation_settings(stored, directory, documents[_MODEL_SETTINGS])
        for name, values in documents.items():
            (directory / name).parent.mkdir(exist_ok=True)
            _write_json(directory / name, values)
        folder = directory / adapter.FOLDER
        _export_weights(files, prefix, folder, meta.model, adapter, dtype, max_file_size)
        description = f"{'averaged' if prefix.startswith('extra.') else 'raw'} weights, {dtype}"
        card = _model_card(checkpoint, adapter, description)
        (directory / "README.md").write_text(card, encoding="utf-8")
        for file in directory.rglob("*.safetensors"):  # which safetensors creates unreadable for others
            file.chmod((directory / "README.md").stat().st_mode)
    return description


def export_adapter(checkpoint: Checkpoint, out: Path, weights: str | None = None) -> None:
    """Write the adapters of a checkpoint to the new directory ``out``, in the format of peft.

    Arguments as for ``export``. Raises ConfigError if the checkpoint has no adapters.
    """
    storage.verify(checkpoint)
    files, model = checkpoint.files, checkpoint.meta.model
    if model.lora is None:
        raise ConfigError(f"adapter=true: {checkpoint.path} has no adapters; leave it out to export the model")
    prefix = _weights_prefix(files, weights)
    with new_directory(out) as directory:
        adapter_files.write(directory, lambda name: files.global_tensor(f"{prefix}{name}"), model)


def _weights_prefix(files: Files, weights: str | None) -> str:
    """Return the prefix of the names of the weights to export."""
    averages = f"extra.{PREFIX}"
    has_averages = any(name.startswith(averages) for name in files.tensors)
    weights = weights or ("average" if has_averages else "raw")
    check_choice("weights", weights, ("average", "raw"))
    if weights == "average" and not has_averages:
        raise ConfigError(f"weights=average: {files.directory} has no averages of weights; use weights=raw")
    return averages if weights == "average" else "model."


def _export_weights(
    files: Files,
    prefix: str,
    folder: Path,
    model: ModelConfig,
    adapter: HuggingFaceAdapter,
    dtype: str,
    max_file_size: str,
) -> None:
    shapes = storage.shapes(replace(model, lora=None))
    names = {ours: adapter.names(ours, model) for ours in shapes}
    empty: dict[str, torch.Tensor] = {}
    for ours, shape in shapes.items():
        theirs = adapter.to_hf(ours, torch.empty(shape, dtype=DTYPES[dtype], device="meta"), model)
        empty |= zip(names[ours], theirs, strict=True)
    pattern = f"{adapter.FILE}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(empty, filename_pattern=pattern, max_shard_size=max_file_size)
    read = adapter_files.merging(lambda name: files.global_tensor(f"{prefix}{name}"), model)
    for file, keys in split.filename_to_tensors.items():
        wanted, tensors = set(keys), dict[str, torch.Tensor]()
        for ours in shapes:
            if wanted.isdisjoint(names[ours]):
                continue
            theirs = adapter.to_hf(ours, read(ours), model)
            for name, tensor in zip(names[ours], theirs, strict=True):
                if name in wanted:
                    tensors[name] = tensor.to(DTYPES[dtype]).contiguous()
                    if not tensors[name].isfinite().all():
                        raise ConfigError(f"dtype={dtype}: {name} has values beyond its range; use dtype=bfloat16")
        save_file(tensors, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / f"{adapter.FILE}.safetensors.index.json", index)


def _tokenizer(stored: Mapping[str, bytes], checkpoint: Path, model: Any) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint that has one. Raises ConfigError for ids that the model does not have."""
    if tokenizers.FILE not in stored:
        return None
    tokenizer = tokenizers.parse(stored, checkpoint)
    if (tokens := tokenizers.vocabulary(tokenizer)) > model.vocab_size:
        raise ConfigError(
            f"{checkpoint / tokenizers.FILE}: its {tokens} tokens are more than the model's {model.vocab_size}; "
            "restore the file"
        )
    return tokenizer


def _special_token_ids(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> dict[str, int]:
    end = tokenizers.end_of_text(tokenizer, files)
    begin = (tokenizers.first_tokens(tokenizer) or [end])[0]
    own = {key: tokenizer.token_to_id(token) for key, token in tokenizers.special_tokens(files).items()}
    ids = {f"{key}_id": own.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    return {"bos_token_id": begin, "eos_token_id": end} | {
        key: token for key, token in ids.items() if token is not None
    }


def _export_generation_settings(stored: Mapping[str, bytes], directory: Path, values: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    if _GENERATION_SETTINGS in stored:
        (directory / _GENERATION_SETTINGS).write_bytes(stored[_GENERATION_SETTINGS])
        return
    ids = {key: values.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(directory)


def _parse_json(stored: Mapping[str, bytes], name: str, checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's file; an empty dictionary if it has no such file."""
    try:
        return dict(json.loads(stored.get(name, b"{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{checkpoint / name}: damaged ({error}); restore the file") from None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _model_card(checkpoint: Checkpoint, adapter: HuggingFaceAdapter, weights: str) -> str:
    """Return the model card of a checkpoint's model in Markdown.

    Losses and commit come from the run directory that contains the checkpoint. Without a run directory, they are
    omitted.
    ``weights`` describes the exported weights.
    """
    meta, run_dir = checkpoint.meta, checkpoint.path.resolve().parents[1]
    family = registry.of(meta.model)
    library = adapter.CLASS.partition(".")[0]
    data = ModelCardData(library_name=library, pipeline_tag=adapter.PIPELINE_TAG, tags=["gpt4d"])
    description = registry.describe(meta.model)
    facts: dict[str, Any] = {"parameters": f"{description.num_parameters:,}"}
    if description.unused_parameters:
        facts["active parameters"] = f"{description.active_parameters:,}"
    facts["weights"] = weights
    if meta.grids:
        facts |= {"data": meta.identity.get("data", ""), "steps": f"{meta.progress.step:,}"}
        facts[family.unit] = f"{meta.progress.units:,}"
        facts |= _losses(run_dir, meta.progress.step) | _commit(run_dir, meta.progress.step)
    else:
        facts["imported from"] = meta.identity.get("data", "")
    facts["gpt4d"] = gpt4d.__version__
    settings = {f"model.{key}": getattr(meta.model, key) for key in family.structure} | meta.settings
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {run_dir.name}\n\n"
        f"A model of the family {family.name}, for {meta.task.replace('_', ' ')}, written by gpt4d.\n\n"
        f"{_table('', '', facts)}\n"
        f"```python\n{adapter.USAGE}```\n\n"
        f"## Settings\n\n{_table('key', 'value', settings)}"
    )


def _losses(run_dir: Path, step: int) -> dict[str, str]:
    path = run_dir / "metrics.jsonl"
    with required_file(path):
        lines = [line for line in read_json_lines(path) if line.get("step", step + 1) <= step]
    found = {}
    for name, event in (("training loss", None), ("validation loss", "validation")):
        values = [line for line in lines if line.get("event") == event and line.get("loss") is not None]
        if values:
            found[name] = f"{values[-1]['loss']:.4f} at step {values[-1]['step']:,}"
    return found


def _commit(run_dir: Path, step: int) -> dict[str, str]:
    """Return the commit of the last start before ``step``."""
    commits = [start for start in starts.read(run_dir) if start.get("step", step) < step and start.get("commit")]
    if not commits:
        return {}
    last = commits[-1]
    return {"commit": last["commit"] + ("" if last.get("clean") else ", with uncommitted changes")}


def _table(key: str, value: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {key} | {value} |", "|---|---|"]
    for name, content in rows.items():
        text = " ".join(str(content).split()).replace("|", "\\|")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines) + "\n"
