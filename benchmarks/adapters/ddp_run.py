"""The run of ``train.py`` with the same overrides in torch's DDP, with the model of transformers or diffusers.

AdamW and clipping are torch's; data, initial weights and learning rates are gpt4d's. Writes the losses to ``out``.

    torchrun --nproc-per-node 4 -m benchmarks.adapters.ddp_run out=FILE model=unet_tiny train.steps=100
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.adapters.library_models import library_model
from gpt4d.config import Config, compose
from gpt4d.data.completion import complete
from gpt4d.data.loader import Batch
from gpt4d.model import registry
from gpt4d.optim.schedule import learning_rate
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage
from gpt4d.task import registry as tasks
from gpt4d.validation import validate


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    if "noisy" in batch.inputs:
        predicted = model(batch.inputs["noisy"].movedim(-1, 1), batch.inputs["timesteps"]).sample
        return F.mse_loss(predicted.movedim(1, -1), batch.targets)
    return F.cross_entropy(model(batch.inputs["ids"]).logits.flatten(0, 1), batch.targets.flatten())


def run(config: Config) -> list[float]:
    """Train on all ranks of the job and return the losses of the global batches."""
    plan = validate(config, dist.get_world_size())
    settings, grid = config.optim, Grid(plan.stages[0].sizes)
    stage = build_stage(plan, grid, torch.device("cpu"))
    task = tasks.get(registry.of(config.model).task).create(config)
    task.connect(stage, plan.micro_batch_size(plan.stages[0]))
    model = DistributedDataParallel(library_model(config.model, stage.module))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, settings.lr, (settings.beta1, settings.beta2), settings.epsilon)
    losses = []
    for step in range(config.train.steps):
        (batch,) = task.batches(step * config.train.batch_size)
        loss = mean_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings, config.train.steps)
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    task.close()
    return losses


if __name__ == "__main__":
    out, *overrides = sys.argv[1:]
    with process_group(Launch.from_environment(), torch.device("cpu")):
        losses = run(complete(compose(overrides)))
        if dist.get_rank() == 0:
            Path(out.removeprefix("out=")).write_text(json.dumps(losses))
