"""The tensors of a run in a checkpoint: which rank writes them, their verification, and their loading on any grid."""

import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir, tensor_files
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.tensor_files import MANIFEST, TENSORS, Chunk, Damaged, Files, Region, StoredTensor
from gpt4d.config import ConfigError, ModelConfig
from gpt4d.data import tokenizers
from gpt4d.model import registry
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import ADAPTERS, ParameterSpec
from gpt4d.runtime.consensus import run_on_all_ranks
from gpt4d.runtime.files import FileEntry
from gpt4d.task.averages import PREFIX

_STATES = {"exp_avg", "exp_avg_sq"}, {"momentum"}  # of AdamW and of Muon; a counter is the run's number of updates


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


def own_shards(shards: Mapping[str, LocalShard], grid: Grid) -> dict[str, LocalShard]:
    """Return the shards that this rank saves. Of the ranks with equal shards, the one with the fewest bytes saves them.

    Empty shards are left out. Ranks whose shards of a tensor are equal have equal shards of all tensors that the same
    axes replicate, so they compute the same bytes without communication.
    """
    sizes, own = grid.sizes._asdict(), dict[str, LocalShard]()
    nbytes: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}  # per replica, by the axes that replicate
    for name, shard in shards.items():
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in shard.spec.layout.axes)
        if axes not in nbytes:
            nbytes[axes] = dict.fromkeys(itertools.product(*(range(sizes[axis]) for axis in axes)), 0)
        replicas = nbytes[axes]
        writer = min(replicas, key=replicas.__getitem__)
        replicas[writer] += shard.local.nbytes
        if writer == tuple(grid[axis].index for axis in axes) and shard.stored(grid).numel():
            own[name] = shard
    return own


def write_shards(
    directory: Path, shards: Mapping[str, LocalShard], grid: Grid
) -> tuple[dict[str, dict], dict[str, FileEntry]]:
    """Write the shards that this rank saves to a file. Return their index, and the file's entry by its name.

    Both are empty if there are no shards.
    """
    if not shards:
        return {}, {}
    file, index = f"rank_{grid.world.index:05}.bin", {}
    entry, starts = tensor_files.write_values(directory / file, (shard.stored(grid) for shard in shards.values()))
    for (name, shard), start in zip(shards.items(), starts, strict=True):
        region = shard.region(grid)
        chunk = Chunk(tuple(first for first, _ in region), tuple(stop - first for first, stop in region), file, start)
        index[name] = StoredTensor(shard.local.dtype, shard.spec.stored_shape, [chunk]).to_json()
    return index, {file: entry}


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
    # Every rank needs all rows.
    _fill(parts(model, optimizer, extra) | _weights(model), checkpoint, grid, f"loading {name}")
    if optimizer is not None:
        optimizer.set_updates(progress.step - progress.skipped)


def load_averages(checkpoint: Checkpoint, model: nn.Module, grid: Grid) -> bool:
    """Load averaged weights (``gpt4d.task.averages``) into a model. Return False if the checkpoint has none.

    All ranks must call this function after ``load``, which verifies the checkpoint.
    """
    if not any(name.startswith(f"extra.{PREFIX}") for name in checkpoint.files.tensors):
        return False
    shards = {f"extra.{PREFIX}{name.removeprefix('model.')}": shard for name, shard in _weights(model).items()}
    _fill(shards, checkpoint, grid, f"loading averages of {checkpoint.path.name}")
    return True


def _fill(shards: Mapping[str, LocalShard], checkpoint: Checkpoint, grid: Grid, work: str) -> None:
    """Read the shards that the checkpoint has on all ranks. A checkpoint without adapters leaves them unchanged."""
    if checkpoint.meta.model.lora is None:
        shards = {name: shard for name, shard in shards.items() if shard.spec.group != ADAPTERS}
    run_on_all_ranks(lambda: fill(shards, checkpoint.files, grid), work)


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


def verify_files(checkpoint: Checkpoint, index: int = 0, of: int = 1) -> None:
    """Verify the files of a checkpoint like ``verify``, without comparing its tensors with a model's."""
    entries = checkpoint.manifest
    for name in (checkpoint_dir.META, TENSORS):
        if name not in entries:
            raise Damaged(f"{checkpoint.path / MANIFEST}: {name} is not listed")
    tensor_files.check_files(checkpoint.path, entries, sorted(entries)[index::of])
    for name in sorted(checkpoint.files.tensors)[index::of]:
        checkpoint.files.check(name, entries)


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
        raise Damaged(f"{directory / MANIFEST}: {tokenizers.FILE} is not listed")
