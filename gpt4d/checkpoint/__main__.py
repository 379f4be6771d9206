"""Verify, inspect, export and import checkpoints: ``python -m gpt4d.checkpoint COMMAND key=value …``.

    verify  checkpoint=runs/NAME             check all files and tensors
    inspect checkpoint=runs/NAME             print metadata and tensors
    export  checkpoint=runs/NAME out=DIR     for transformers or diffusers: AutoModelForCausalLM.from_pretrained("DIR")
            dtype=float32|bfloat16|float16   by default the dtype of an imported model, otherwise float32
            weights=average|raw              by default the averages from which samples are drawn, if present
            adapter=true                     only the adapters of lora.*, for peft; by default they are merged
    import  source=gpt2|DIR out=runs/NAME    from transformers or diffusers: weights whose training continues
            tokenizer=none|NAME              instead of the tokenizer in source: a file, a directory or a hub name
            adapter=DIR                      also the adapters that peft has written to this directory

``checkpoint`` is a checkpoint or a run directory. In a run directory, ``verify`` checks all checkpoints, and every
other command uses the newest checkpoint.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from gpt4d.checkpoint.checkpoint_dir import Checkpoint, committed
from gpt4d.checkpoint.model_directory import adapter_of
from gpt4d.checkpoint.tensor_files import Damaged, StoredTensor
from gpt4d.config import ConfigError, asks_for_help, from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.model import registry

# Modules that import torch or transformers, which takes seconds, are imported where they are needed.


@dataclass
class ReadConfig:
    """Settings of ``verify`` and ``inspect``: a checkpoint or a run directory."""

    checkpoint: str = MISSING


@dataclass
class ExportConfig:
    """Settings of ``export``; the text of this module explains them."""

    checkpoint: str = MISSING
    out: str = MISSING
    dtype: str | None = None
    weights: str | None = None
    adapter: bool = False


@dataclass
class ImportConfig:
    """Settings of ``import``; the text of this module explains them."""

    source: str = MISSING
    out: str = MISSING
    tokenizer: str | None = None
    adapter: str | None = None


def verify(config: ReadConfig) -> None:
    """Print one line for each checkpoint. Raises ConfigError at the end if a checkpoint is damaged or unreadable."""
    from gpt4d.checkpoint import storage

    path = Path(config.checkpoint)
    checkpoints, failed = committed(path) or [Checkpoint.open(path).path], []
    for directory in checkpoints:
        checkpoint = Checkpoint(directory)
        try:
            storage.verify(checkpoint)
            tensors, entries = checkpoint.files.tensors, checkpoint.manifest
            size = _size(sum(entry.bytes for entry in entries.values()))
            print(f"{directory}: intact, {len(entries)} files, {size}, {len(tensors)} tensors", flush=True)
        except ConfigError as error:
            print(f"{directory}: {'DAMAGED' if isinstance(error, Damaged) else 'UNREADABLE'}, {error}", flush=True)
            failed.append(directory.name)
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(checkpoints)} checkpoints failed: {', '.join(failed)}; restore or remove them"
        )


def inspect(config: ReadConfig) -> None:
    """Print a checkpoint's metadata and tensors, with one line for the equal tensors of all blocks."""
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    meta, files, entries = checkpoint.meta, checkpoint.files, checkpoint.manifest
    family = registry.of(meta.model)
    grids = ", ".join("x".join(map(str, grid.values())) for grid in meta.grids)
    losses = f"  losses    {_key_values(meta.validation)}\n" if meta.validation else ""
    print(
        f"{checkpoint.path}\n"
        f"  progress  {', '.join(f'{key} {value:,}' for key, value in asdict(meta.progress).items())}\n"
        f"  task      {meta.task}: {_key_values(meta.identity)}\n"
        f"  model     {meta.model.name}, {family.name}: "
        f"{_key_values({key: getattr(meta.model, key) for key in family.structure})}\n"
        f"  grid      {f'{grids} (x, y, z, data)' if grids else 'none (imported)'}\n"
        f"{losses}"
        f"  files     {len(entries)}, {_size(sum(entry.bytes for entry in entries.values()))}\n"
    )
    groups: dict[str, list[StoredTensor]] = {}
    for name, tensor in sorted(files.tensors.items()):
        if name.startswith("optim."):  # Shapes equal the parameters'.
            name = f"optim.*.{name.rpartition('.')[2]}"
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(tensor)
    width = max(map(len, groups), default=0)
    for name, tensors in groups.items():
        shapes, dtypes = ({getattr(tensor, key) for tensor in tensors} for key in ("shape", "dtype"))
        shape = str(list(shapes.pop())) if len(shapes) == 1 else "tensors"
        count_and_shape = f"{len(tensors)} × {shape}" if len(tensors) > 1 else shape
        dtype = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        print(
            f"  {name:{width}}  {count_and_shape:>20}  {dtype}  {_size(sum(tensor.nbytes for tensor in tensors)):>10}"
        )


def export(config: ExportConfig) -> None:
    """Write a model for transformers or diffusers to ``config.out``, and print how to load it."""
    from gpt4d.checkpoint import exporter

    checkpoint, out = Checkpoint.open(Path(config.checkpoint)), Path(config.out)
    if config.adapter:
        if config.dtype:
            raise ConfigError(f"dtype={config.dtype}: adapters are exported in float32; leave it out")
        exporter.export_adapter(checkpoint, out, config.weights)
        print(f'{out}: adapters of {checkpoint.path}; load them with PeftModel.from_pretrained(model, "{out}")')
        return
    weights = exporter.export(checkpoint, out, config.dtype, config.weights)
    adapter = adapter_of(registry.of(checkpoint.meta.model))
    print(f'{out}: exported from {checkpoint.path}, {weights}; load it with {adapter.CLASS}.from_pretrained("{out}")')


def import_(config: ImportConfig) -> None:
    """Create a run at step 0 from a model of transformers or diffusers, and print the commands that train it."""
    from gpt4d.checkpoint import importer

    model = importer.import_model(config.source, Path(config.out), config.tokenizer, config.adapter)
    print(f"{config.out}: imported at step 0.")
    if first := importer.first_tokens(Path(config.out)):
        print(
            f"Its tokenizer puts {first} before a text, so prompts and the documents of your data begin with it; "
            "data.begin_of_text=false trains without it."
        )
    for kind, command in importer.commands(Path(config.out), model).items():
        print(f"\nTo train it on your {kind}:\n\n{command}")


def _key_values(values: Mapping) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


COMMANDS: dict[str, tuple[Callable[[Any], None], type]] = {
    "verify": (verify, ReadConfig),
    "inspect": (inspect, ReadConfig),
    "export": (export, ExportConfig),
    "import": (import_, ImportConfig),
}


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names with its ``key=value`` arguments."""
    if not arguments or arguments[0] not in COMMANDS:
        problem = f"{arguments[0]}: no such command" if arguments else "no command given"
        if asks_for_help(arguments):
            print(__doc__)
            return
        raise ConfigError(f"{problem}; use one of {', '.join(COMMANDS)}, or --help")
    command, schema = COMMANDS[arguments[0]]
    command(from_arguments(schema, arguments[1:]))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
