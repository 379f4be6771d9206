"""``python -m gpt4d.checkpoint verify|inspect|export|import key=value …``: looks after checkpoints.

    verify  checkpoint=runs/NAME             whether each file is as it was written and the tensors are whole
    inspect checkpoint=runs/NAME             what is in it
    export  checkpoint=runs/NAME out=DIR     for transformers: AutoModelForCausalLM.from_pretrained("DIR")
    import  source=gpt2|DIR out=runs/NAME    from transformers: a run to go on from, at step 0

A checkpoint is its own directory or a run's: then ``verify`` looks at all of them, the others at the newest.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from gpt4d.checkpoint import checkpoint_dir, manifest
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, from_arguments
from gpt4d.runtime.errors import one_line_errors

# torch and transformers take seconds to import: only where they are needed.


@dataclass
class Look:
    checkpoint: str = MISSING


@dataclass
class Export:
    checkpoint: str = MISSING
    out: str = MISSING


@dataclass
class Import:
    source: str = MISSING
    out: str = MISSING


def verify(config: Look) -> None:
    """Prints a line for each checkpoint. ConfigError at the end if one is not whole."""
    from gpt4d.checkpoint import verifying

    path = Path(config.checkpoint)
    found, bad = checkpoint_dir.committed(path) or [checkpoint_dir.located(path)], []
    for directory in found:
        try:
            tensors, entries = verifying.verify(directory).tensors, manifest.read(directory)
            size = _size(sum(entry.bytes for entry in entries.values()))
            print(f"{directory}: whole, {len(entries)} files, {size}, {len(tensors)} tensors", flush=True)
        except ConfigError as error:
            print(f"{directory}: {'DAMAGED' if isinstance(error, Damaged) else 'UNREADABLE'}, {error}", flush=True)
            bad.append(directory.name)
    if bad:
        raise ConfigError(f"{len(bad)} of {len(found)} not whole: {', '.join(bad)}")


def inspect(config: Look) -> None:
    """Prints what a checkpoint says of itself and what tensors it has, those of all blocks in one line."""
    from gpt4d.checkpoint import storage

    directory = checkpoint_dir.located(Path(config.checkpoint))
    meta, files, entries = checkpoint_dir.Meta.read(directory), storage.Files(directory), manifest.read(directory)
    progress, model = meta.progress, meta.model
    grid = "x".join(map(str, meta.grid.values())) + " (x, y, z, data)" if meta.grid else "none, it was imported"
    print(
        f"{directory}\n"
        f"  step    {progress.step:,}, {progress.samples:,} sequences, {progress.tokens:,} tokens of {meta.data}\n"
        f"  model   {model.name}: {model.layers} layers, hidden {model.hidden}, {model.heads} heads, "
        f"vocabulary {model.vocab_size:,} (padded {model.padded_vocab_size:,}), {model.max_positions} positions\n"
        f"  grid    {grid}\n"
        f"  files   {len(entries)}, {_size(sum(entry.bytes for entry in entries.values()))}\n"
    )
    alike: dict[str, list[storage.StoredTensor]] = {}
    for name, tensor in sorted(files.tensors.items()):
        if name.startswith("optim."):  # of the same shapes as the model's
            name = f"optim.*.{name.rpartition('.')[2]}"
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(tensor)
    width = max(map(len, alike), default=0)
    for name, tensors in alike.items():
        shapes, dtypes = ({getattr(tensor, key) for tensor in tensors} for key in ("shape", "dtype"))
        shape = str(list(shapes.pop())) if len(shapes) == 1 else "tensors"
        what = f"{len(tensors)} × {shape}" if len(tensors) > 1 else shape
        dtype = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        print(f"  {name:{width}}  {what:>20}  {dtype}  {_size(sum(tensor.nbytes for tensor in tensors)):>10}")


def export(config: Export) -> None:
    from gpt4d.checkpoint import convert

    directory, out = checkpoint_dir.located(Path(config.checkpoint)), Path(config.out)
    convert.export(directory, out)
    print(f'{out}: {directory} for transformers: AutoModelForCausalLM.from_pretrained("{out}")')


def import_(config: Import) -> None:
    from gpt4d.checkpoint import convert

    model = convert.import_model(config.source, Path(config.out))
    keys = ("layers", "hidden", "heads", "vocab_size", "max_positions", "norm_epsilon", "dropout", "attention_dropout")
    words = " ".join(f"model.{key}={getattr(model, key)}" for key in keys)
    tokenizer = checkpoint_dir.located(Path(config.out)) / checkpoint_dir.TOKENIZER
    print(f"{config.out}: a run at step 0. To train it on your text:\n")
    print(f"python train.py run.dir={config.out} {words} data=text data.path='…' data.tokenizer={tokenizer}")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


COMMANDS = {
    "verify": (verify, Look),
    "inspect": (inspect, Look),
    "export": (export, Export),
    "import": (import_, Import),
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in COMMANDS:
        words = f"{arguments[0]}: no such command" if arguments else "no command given"
        if arguments and arguments[0] in ("--help", "-h"):
            print(__doc__)
            return
        raise ConfigError(f"{words}; use one of {', '.join(COMMANDS)}, or --help")
    command, schema = COMMANDS[arguments[0]]
    command(from_arguments(schema, arguments[1:]))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
