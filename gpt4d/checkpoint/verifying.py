"""Verification of checkpoints: files match the manifest, and every tensor of the model is stored exactly once."""

import re
from pathlib import Path

from gpt4d.checkpoint import checkpoint_dir, manifest, storage
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ModelConfig
from gpt4d.data import tokenizers
from gpt4d.model import registry


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters in a checkpoint, by name."""
    return {name: spec.stored_shape for name, spec in registry.describe(config).parameters.items()}


def verify(directory: Path, index: int = 0, of: int = 1) -> storage.Files:
    """Verify a checkpoint and return its tensors. Raises Damaged, naming the file, if it is not intact.

    Ranks share the work that grows with the checkpoint: this call does share ``index`` of ``of``.
    """
    files, meta = verify_files(directory, index, of), checkpoint_dir.Meta.read(directory)
    if re.fullmatch(r"step_\d+", directory.name) and directory.name != checkpoint_dir.name(meta.progress.step):
        raise Damaged(f"{directory}: renamed, {checkpoint_dir.META} is of step {meta.progress.step}")
    states = {name.rpartition(".")[2] for name in files.tensors if name.startswith("optim.")}
    unknown = {name for name in files.tensors if not name.startswith("extra.")}  # ``meta`` has those of rank 0
    for parameter, shape in shapes(meta.model).items():
        for name in (f"model.{parameter}", *(f"optim.{parameter}.{state}" for state in states)):
            if name not in files.tensors or files.tensors[name].shape != shape:
                raise Damaged(f"{directory / storage.TENSORS}: {name} of shape {list(shape)} is missing")
            unknown.remove(name)
    for name in meta.extra:
        if f"extra.{name}" not in files.tensors:
            raise Damaged(f"{directory / storage.TENSORS}: extra.{name} is missing")
    if unknown:
        raise Damaged(f"{directory / storage.TENSORS}: {min(unknown)} is no tensor of this model")
    if "tokenizer" in meta.identity and tokenizers.FILE not in manifest.read(directory):
        raise Damaged(f"{directory / manifest.MANIFEST}: {tokenizers.FILE} is not listed")
    return files


def verify_files(directory: Path, index: int = 0, of: int = 1) -> storage.Files:
    """Verify the files of a checkpoint like ``verify``, without comparing its tensors with a model's."""
    entries = manifest.read(directory)
    for name in (checkpoint_dir.META, storage.TENSORS):
        if name not in entries:
            raise Damaged(f"{directory / manifest.MANIFEST}: {name} is not listed")
    manifest.check(directory, entries, sorted(entries)[index::of])
    files = storage.Files(directory)
    for name in sorted(files.tensors)[index::of]:
        files.check(name, entries)
    return files
