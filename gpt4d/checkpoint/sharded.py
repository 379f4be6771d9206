"""A run's state as global tensors, and how any grid loads it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir, storage, verifying
from gpt4d.config import ConfigError
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.runtime.consensus import run_on_all_ranks
from gpt4d.task.averages import PREFIX

_STATES = ("exp_avg", "exp_avg_sq")  # AdamW's states per element; its counter is the run's number of updates


class LocalShard(NamedTuple):
    """This rank's part of a global tensor, padding included, and that tensor's shape and layout."""

    local: torch.Tensor
    spec: ParameterSpec

    def region(self, grid: Grid) -> storage.Region:
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
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, tuple[torch.Tensor, ParameterSpec]] | None = None,
    without: Collection[str] = (),
) -> dict[str, LocalShard]:
    """Return the state to save by its names on disk: ``model.NAME``, ``optim.NAME.exp_avg``, …, ``extra.NAME``.

    ``extra`` is further state by name, such as averaged weights: this rank's part and its spec. ``without``: names of
    parameters that other ranks save.
    """
    parameters: dict[str, Any] = dict(model.named_parameters())  # nn.Parameter with the attribute spec
    shards = {f"model.{n}": LocalShard(p.detach(), p.spec) for n, p in parameters.items() if n not in without}
    if optimizer is not None:
        # The optimizer may hold slices of the model's parameters, with layouts of their own.
        for group in optimizer.param_groups:
            for n, p in zip(group["param_names"], group["params"], strict=True):
                shards |= {f"optim.{n}.{k}": LocalShard(optimizer.state[p][k], p.spec) for k in _STATES}
    return shards | {f"extra.{n}": LocalShard(*shard) for n, shard in (extra or {}).items()}


def load(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    grid: Grid,
    extra: Mapping[str, tuple[torch.Tensor, ParameterSpec]] | None = None,
) -> checkpoint_dir.Progress:
    """Load the model, and the optimizer and ``extra`` if given, in place from a checkpoint written on any grid.

    A checkpoint without optimizer states, such as an imported model, leaves these two unchanged. Each rank first
    verifies a share of the files. All ranks must call this function; an error on one is raised on all. Raises Damaged,
    before anything is loaded, if the checkpoint is not intact, ConfigError if its tensors are not the model's.
    """
    files = run_on_all_ranks(
        lambda: verifying.verify(directory, grid.world.index, grid.world.size), f"verifying {directory.name}"
    )
    progress = checkpoint_dir.Meta.read(directory).progress
    if not any(name.startswith("optim.") for name in files.tensors):
        optimizer = extra = None
    run_on_all_ranks(lambda: fill(parts(model, optimizer, extra), files, grid), f"loading {directory.name}")
    if optimizer is not None:
        for state in optimizer.state.values():
            state["step"].fill_(progress.step - progress.skipped)
    return progress


def load_averages(directory: Path, model: nn.Module, grid: Grid) -> bool:
    """Load averages of weights (``gpt4d.task.averages``) into a model, if the checkpoint has them; return whether.

    All ranks must call this function after ``load``, which verifies the checkpoint.
    """
    files = storage.Files(directory)
    if not any(name.startswith(f"extra.{PREFIX}") for name in files.tensors):
        return False
    named: dict[str, Any] = dict(model.named_parameters())
    shards = {f"extra.{PREFIX}{name}": LocalShard(p.detach(), p.spec) for name, p in named.items()}
    run_on_all_ranks(lambda: fill(shards, files, grid), f"loading averages of {directory.name}")
    return True


def fill(shards: Mapping[str, LocalShard], files: storage.Files, grid: Grid) -> None:
    """Read ``shards`` in place. Raises ConfigError if the files lack a tensor of the same name, shape and dtype."""
    for name, shard in shards.items():
        stored, expected = files.tensors.get(name), (shard.spec.stored_shape, shard.local.dtype)
        if stored is None or (stored.shape, stored.dtype) != expected:
            actual = "missing" if stored is None else f"of shape {list(stored.shape)}, {stored.dtype}"
            raise ConfigError(
                f"{files.directory}: {name} is {actual}, but this run needs shape {list(shard.spec.stored_shape)}, "
                f"{shard.local.dtype}; use a checkpoint of the same model or set run.name"
            )
        into = shard.stored(grid)
        if into.shape != shard.local.shape:
            shard.local.zero_()  # the padding
        files.read(name, shard.region(grid), into)
