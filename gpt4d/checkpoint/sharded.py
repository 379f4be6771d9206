"""Sharded checkpoints through torch.distributed.checkpoint: every rank writes its parts of the global tensors.

On disk there are only global tensors under the parameters' names, so any other grid can read them.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gpt4d.checkpoint import catalog
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import ParameterSpec


def as_global(local: torch.Tensor, spec: ParameterSpec, grid: Grid) -> DTensor:
    """The global tensor of which ``local`` is this rank's part: a DTensor on the same memory."""
    placements = []
    for axis in grid.mesh.mesh_dim_names:
        dims = [dim for dim, axes in enumerate(spec.layout.dims) if axis in axes]
        placements.append(Shard(dims[0]) if dims else Replicate())
    strides = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local.detach(), grid.mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=strides
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None, grid: Grid) -> dict:
    state = {"model": {n: as_global(p, p.spec, grid) for n, p in model.named_parameters()}}
    if optimizer is not None:
        # The optimizer's parameters may be parts of the model's: their own layouts say which.
        state["optim"] = {
            n: {k: as_global(optimizer.state[p][k], p.spec, grid) for k in ("exp_avg", "exp_avg_sq")}
            for group in optimizer.param_groups
            for n, p in zip(group["param_names"], group["params"], strict=True)
        }
    return state


def save(
    run_dir: Path,
    meta: catalog.Meta,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    grid: Grid,
    tokenizer: Path,
    keep: int,
) -> Path:
    """Writes a checkpoint of ``run_dir`` and removes those beyond the ``keep`` newest. All ranks call it.

    It is written under another name and gets its own by one rename, once every rank's part is there.
    """
    final = run_dir / "checkpoints" / catalog.name(meta.progress.step)
    partial = final.with_name(final.name + ".partial")
    if grid.world.index == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(model, optimizer, grid), checkpoint_id=partial)
    if grid.world.index == 0:
        shutil.copy(tokenizer, partial / "tokenizer.json")
        meta.write(partial)
        if final.exists():  # a removal that was interrupted left it
            shutil.rmtree(final)
        os.replace(partial, final)
        catalog.remove_old(run_dir, keep)
    dist.barrier()
    return final


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, grid: Grid) -> catalog.Progress:
    """Fills the model, and the optimizer if given, in place from a checkpoint written on any grid."""
    meta = catalog.Meta.read(directory)
    dcp.load(_state(model, optimizer, grid), checkpoint_id=directory)
    if optimizer is not None:
        for state in optimizer.state.values():
            state["step"].fill_(meta.progress.step)
    return meta.progress
