"""The stored tensors of a checkpoint: their file format, their verification, and their loading on any grid.

Each rank writes one file of raw values, ``rank_00003.bin``. The index ``tensors.json`` lists for each global tensor its
dtype, shape and chunks, each with its file and byte offset. The index contains no ranks or grids, so a rank of any grid
reads the region it needs without more planning. There are no pickles.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.checkpoint_dir import Checkpoint, Damaged
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.data import tokenizers
from gpt4d.model import registry
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.runtime import activity
from gpt4d.runtime.consensus import run_on_all_ranks
from gpt4d.runtime.files import FileEntry, counts
from gpt4d.task.averages import PREFIX

TENSORS = "tensors.json"
Region = tuple[tuple[int, int], ...]  # (start, stop) along each dim of a global tensor
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_STATES = {"exp_avg", "exp_avg_sq"}, {"momentum"}  # of AdamW and of Muon; a counter is the run's number of updates


class Chunk(NamedTuple):
    """A region of a global tensor, and the file and offset of its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte offset


@dataclass
class StoredTensor:
    """A global tensor on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    def to_json(self) -> dict:
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": self.shape, "chunks": self.chunks}

    @classmethod
    def from_json(cls, values: dict) -> "StoredTensor":
        shape, chunks = counts(values["shape"]), []
        for offsets, sizes, file, start in values["chunks"]:
            chunk = Chunk(counts(offsets), counts(sizes), file, *counts([start]))
            if not (len(chunk.offsets) == len(chunk.sizes) == len(shape) and isinstance(file, str)):
                raise ValueError(f"{chunk} does not match a tensor of shape {shape}")
            chunks.append(chunk)
        return cls(_DTYPES[values["dtype"]], shape, chunks)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Return why the chunks do not cover the tensor exactly once, or None if they do."""
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape):
            return "the chunks and the tensor differ in their number of elements"
        if not all(math.prod(chunk.sizes) for chunk in self.chunks):
            return "a chunk is empty"
        starts = np.array([chunk.offsets for chunk in self.chunks])
        stops = starts + np.array([chunk.sizes for chunk in self.chunks])
        if (stops > np.array(self.shape)).any():
            return "a chunk exceeds the tensor's shape"
        return "two chunks overlap" if len(self.chunks) > 1 and _overlap(starts, stops) else None


def _overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Return whether two of n boxes have a common element. ``starts`` and ``stops`` (exclusive) are [n, dims]."""
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))  # leaves the fewest pairs
    order = starts[:, dim].argsort()
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim])  # boxes from here on begin after the box's end
    for box in np.flatnonzero(ends > np.arange(len(ends)) + 1).tolist():
        later = slice(box + 1, ends[box])
        if ((starts[box] < stops[later]) & (starts[later] < stops[box])).all(-1).any():
            return True
    return False


class Files:
    """The tensors of a checkpoint directory, memory-mapped, so that values are loaded on access.

    Methods raise Damaged, naming the file, if a file does not match ``tensors.json``.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._mapped: dict[str, torch.Tensor] = {}
        self.tensors = checkpoint_dir.parse_json(
            directory / TENSORS, lambda values: {name: StoredTensor.from_json(t) for name, t in values.items()}
        )

    def check(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Raise Damaged unless the tensor's chunks lie in files of the manifest and cover it exactly once."""
        tensor = self.tensors[name]
        problem = tensor.problem()
        for chunk in tensor.chunks:
            if chunk.file not in entries:
                problem = f"{chunk.file!r} is not listed in the manifest"
            else:
                self.chunk_values(tensor, chunk)
        if problem:
            raise Damaged(f"{self.directory / TENSORS}: {name}: {problem}")

    def chunk_values(self, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """Return a chunk as a read-only view of its file."""
        end = chunk.start + math.prod(chunk.sizes) * tensor.dtype.itemsize
        values = self._bytes(chunk.file)[chunk.start : end]
        if chunk.start % tensor.dtype.itemsize or len(values) != end - chunk.start:
            raise Damaged(f"{self.directory / TENSORS}: a chunk lies outside {chunk.file}")
        return values.view(tensor.dtype).view(chunk.sizes)

    def global_tensor(self, name: str) -> torch.Tensor:
        """Return a global tensor, loaded into memory."""
        tensor = self.tensors[name]
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(name, tuple((0, extent) for extent in tensor.shape), result)
        return result

    def read(self, name: str, region: Region, into: torch.Tensor) -> None:
        """Fill ``into`` with a region of a global tensor, from all chunks that overlap the region."""
        tensor, elements_read = self.tensors[name], 0
        for chunk in tensor.chunks:
            ends = zip(region, chunk.offsets, chunk.sizes, strict=True)
            common = [(max(start, o), min(stop, o + size)) for (start, stop), o, size in ends]
            if all(start < stop for start, stop in common):
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, region, strict=True))
                into[target] = self.chunk_values(tensor, chunk)[source]
                activity.progress()
                elements_read += math.prod(b - a for a, b in common)
        if elements_read != into.numel():
            raise Damaged(f"{self.directory / TENSORS}: the chunks of {name} do not cover it")

    def _bytes(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            path = self.directory / name
            if path.parent != self.directory:
                raise Damaged(f"{self.directory / TENSORS}: {name!r} is not a file name in this directory")
            with checkpoint_dir.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            self._mapped[name] = torch.from_file(str(path), size=size, dtype=torch.uint8)
        return self._mapped[name]


class LocalShard(NamedTuple):
    """This rank's shard of a global tensor, padding included, and the global tensor's shape and layout."""

    local: torch.Tensor
    spec: ParameterSpec

    def region(self, grid: Grid) -> Region:
        """Return the region of the stored tensor that ``local`` holds."""
        return self.spec.stored_region(grid.sizes._asdict(), grid.indices)

    def slices(self, grid: Grid) -> tuple[slice, ...]:
        """Return ``region`` as an index of the stored tensor."""
        return tuple(slice(*ends) for ends in self.region(grid))

    def stored(self, grid: Grid) -> torch.Tensor:
        """Return ``local`` without padding."""
        return self.local[tuple(slice(stop - start) for start, stop in self.region(grid))]


def parts(
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, tuple[torch.Tensor, ParameterSpec]] | None = None,
    without: Collection[str] = (),
) -> dict[str, LocalShard]:
    """Return the state to save by its names on disk: ``model.NAME``, ``optim.NAME.exp_avg``, …, ``extra.NAME``.

    If the optimizer has only some rows of a weight, this rank saves only these rows, because its other rows may be
    rounded (gpt4d.parallel.gradient_reducer).

    ``extra`` is additional state by name, such as averaged weights: this rank's shard and its spec. ``without``
    contains the names of parameters that other ranks save.
    """
    shards = {name: shard for name, shard in _weights(model).items() if name.removeprefix("model.") not in without}
    if optimizer is not None:
        shards |= {f"model.{name}": LocalShard(p.detach(), p.spec) for name, p in optimizer.shards()}
        shards |= {f"optim.{name}": LocalShard(*state) for name, state in optimizer.states().items()}
    return shards | {f"extra.{n}": LocalShard(*shard) for n, shard in (extra or {}).items()}


def _weights(model: nn.Module) -> dict[str, LocalShard]:
    """Return this rank's shards of all weights by their names on disk."""
    parameters: dict[str, Any] = dict(model.named_parameters())  # nn.Parameter with the attribute spec
    return {f"model.{name}": LocalShard(p.detach(), p.spec) for name, p in parameters.items()}


def load(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None,
    grid: Grid,
    extra: Mapping[str, tuple[torch.Tensor, ParameterSpec]] | None = None,
) -> None:
    """Load the model, and the optimizer and ``extra`` if given, in place from a checkpoint written on any grid.

    A checkpoint without optimizer states, such as an imported model, leaves ``optimizer`` and ``extra`` unchanged. Each
    rank first verifies a share of the files. All ranks must call this function; an error on one is raised on all.
    Raises Damaged, before anything is loaded, if the checkpoint is not intact. Raises ConfigError if its tensors do not
    match the model.
    """
    name = checkpoint.path.name
    run_on_all_ranks(lambda: verify(checkpoint, grid.world.index, grid.world.size), f"verifying {name}")
    files, progress = checkpoint.files, checkpoint.meta.progress
    if not any(name.startswith("optim.") for name in files.tensors):
        optimizer = extra = None
    shards = parts(model, optimizer, extra) | _weights(model)  # every rank needs all rows
    if checkpoint.meta.model.lora is None:  # the adapters are new
        shards = {name: shard for name, shard in shards.items() if not shard.spec.is_adapter}
    run_on_all_ranks(lambda: fill(shards, files, grid), f"loading {name}")
    if optimizer is not None:
        optimizer.set_updates(progress.step - progress.skipped)


def load_averages(checkpoint: Checkpoint, model: nn.Module, grid: Grid) -> bool:
    """Load averaged weights (``gpt4d.task.averages``) into a model. Return False if the checkpoint has none.

    All ranks must call this function after ``load``, which verifies the checkpoint.
    """
    files = checkpoint.files
    if not any(name.startswith(f"extra.{PREFIX}") for name in files.tensors):
        return False
    named: dict[str, Any] = dict(model.named_parameters())
    shards = {
        f"extra.{PREFIX}{name}": LocalShard(p.detach(), p.spec)
        for name, p in named.items()
        if not p.spec.is_adapter or checkpoint.meta.model.lora is not None
    }
    run_on_all_ranks(lambda: fill(shards, files, grid), f"loading averages of {checkpoint.path.name}")
    return True


def fill(shards: Mapping[str, LocalShard], files: Files, grid: Grid) -> None:
    """Read ``shards`` in place. Raises ConfigError if the files lack a tensor of the same name, shape and dtype."""
    for name, shard in shards.items():
        stored, expected = files.tensors.get(name), (shard.spec.stored_shape, shard.local.dtype)
        if stored is not None and shard.spec.frozen:
            expected = (shard.spec.stored_shape, stored.dtype)  # converted to the compute dtype of this run
        if stored is None or (stored.shape, stored.dtype) != expected:
            actual = "missing" if stored is None else f"of shape {list(stored.shape)}, {stored.dtype}"
            remedy = "use a checkpoint of the same model or set run.name"
            if stored is None and name.startswith("optim."):
                remedy = (
                    "the checkpoint has the states of another optimizer: set the old optim.algorithm, or another "
                    f"run.name and checkpoint.init={files.directory}"
                )
            raise ConfigError(
                f"{files.directory}: {name} is {actual}, but this run needs shape {list(shard.spec.stored_shape)}, "
                f"{shard.local.dtype}; {remedy}"
            )
        into = shard.stored(grid)
        if into.shape != shard.local.shape:
            shard.local.zero_()  # the padding
        files.read(name, shard.region(grid), into)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters in a checkpoint, by name."""
    return {name: spec.stored_shape for name, spec in registry.describe(config).parameters.items()}


def verify(checkpoint: Checkpoint, index: int = 0, of: int = 1) -> None:
    """Verify that files match the manifest, and that every tensor of the model is stored exactly once.

    Ranks share the work that grows with the checkpoint: this call verifies share ``index`` of ``of`` shares. Raises
    Damaged, naming the file, if the checkpoint is not intact.
    """
    verify_files(checkpoint, index, of)
    directory, meta, tensors = checkpoint.path, checkpoint.meta, checkpoint.files.tensors
    if re.fullmatch(r"step_\d+", directory.name) and directory.name != checkpoint_dir.name(meta.progress.step):
        raise Damaged(f"{directory}: renamed, {checkpoint_dir.META} is of step {meta.progress.step}")
    states: dict[str, set[str]] = {}  # by parameter
    for name in tensors:
        if name.startswith("optim."):
            parameter, _, state = name.removeprefix("optim.").rpartition(".")
            states.setdefault(parameter, set()).add(state)
    unknown = {name for name in tensors if not name.startswith("extra.")}  # ``meta`` lists the extra tensors of rank 0
    for parameter, spec in registry.describe(meta.model).parameters.items():
        shape, found = spec.stored_shape, states.get(parameter, set())
        complete = next((each for each in _STATES if found & each), _STATES[0])
        expected = sorted(complete) if states and not spec.frozen else []
        for name in (f"model.{parameter}", *(f"optim.{parameter}.{state}" for state in expected)):
            if name not in tensors or tensors[name].shape != shape:
                raise Damaged(f"{directory / TENSORS}: {name} of shape {list(shape)} is missing")
            unknown.remove(name)
    for name in meta.extra:
        if f"extra.{name}" not in tensors:
            raise Damaged(f"{directory / TENSORS}: extra.{name} is missing")
    if unknown:
        raise Damaged(f"{directory / TENSORS}: {min(unknown)} is not a tensor of this model")
    if "tokenizer" in meta.identity and tokenizers.FILE not in checkpoint.manifest:
        raise Damaged(f"{directory / checkpoint_dir.MANIFEST}: {tokenizers.FILE} is not listed")


def verify_files(checkpoint: Checkpoint, index: int = 0, of: int = 1) -> None:
    """Verify the files of a checkpoint like ``verify``, without comparing its tensors with a model's."""
    entries = checkpoint.manifest
    for name in (checkpoint_dir.META, TENSORS):
        if name not in entries:
            raise Damaged(f"{checkpoint.path / checkpoint_dir.MANIFEST}: {name} is not listed")
    checkpoint_dir.check_files(checkpoint.path, entries, sorted(entries)[index::of])
    files = checkpoint.files
    for name in sorted(files.tensors)[index::of]:
        files.check(name, entries)
