"""A run's state as global tensors, and how it is read back onto any grid."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir, storage, verifying
from gpt4d.config import ConfigError
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import ParameterSpec
from gpt4d.runtime.consensus import run_on_all_ranks

_STATES = ("exp_avg", "exp_avg_sq")  # of AdamW, element by element; its step is the run's


class Part(NamedTuple):
    """This rank's part of a global tensor, and what that tensor is."""

    local: torch.Tensor
    spec: ParameterSpec

    def tile(self, grid: Grid) -> storage.Tile:
        """Which part of the global tensor it is."""
        return self.spec.layout.tile(self.spec.shape, grid.sizes._asdict(), grid.indices)


def parts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Part]:
    """Everything that is trained, by its name on the disk: ``model.NAME`` and ``optim.NAME.exp_avg``, …"""
    found = {f"model.{n}": Part(p.detach(), p.spec) for n, p in model.named_parameters()}
    if optimizer is not None:
        # The optimizer's parameters may be parts of the model's: their own layouts say which.
        for group in optimizer.param_groups:
            for n, p in zip(group["param_names"], group["params"], strict=True):
                found |= {f"optim.{n}.{k}": Part(optimizer.state[p][k], p.spec) for k in _STATES}
    return found


def load(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, grid: Grid
) -> checkpoint_dir.Progress:
    """Fills the model, and the optimizer if given, in place from a checkpoint written on any grid.

    One without optimizer states, such as an imported model, leaves those of the optimizer as they are. Damaged, before
    anything is filled, unless the checkpoint is whole: each rank reads some of it to see. ConfigError if its tensors
    are not those of the model. All ranks call it, and if it fails on one, it fails alike on all.
    """
    files = run_on_all_ranks(lambda: verifying.verify(directory, grid.world.index, grid.world.size))
    progress = checkpoint_dir.Meta.read(directory).progress
    if not any(name.startswith("optim.") for name in files.tensors):
        optimizer = None
    run_on_all_ranks(lambda: fill(parts(model, optimizer), files, grid))
    if optimizer is not None:
        for state in optimizer.state.values():
            state["step"].fill_(progress.step)
    return progress


def fill(parts: Mapping[str, Part], files: storage.Files, grid: Grid) -> None:
    """Reads ``parts`` in place. ConfigError if the files do not have tensors of their names and global shapes."""
    for name, part in parts.items():
        found, wanted = files.tensors.get(name), (part.spec.shape, part.local.dtype)
        if found is None or (found.shape, found.dtype) != wanted:
            theirs = "none of that name" if found is None else f"one of shape {list(found.shape)}, {found.dtype}"
            raise ConfigError(
                f"{files.directory}: another model's, which has {theirs} where this has {name} of "
                f"{list(part.spec.shape)}, {part.local.dtype}"
            )
        files.read(name, part.tile(grid), part.local)
