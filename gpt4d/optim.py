"""AdamW on this rank's shards of the parameters, the learning-rate schedule, and clipping by the global norm."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from gpt4d.config import OptimConfig


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW on named parameters or shards of them (it works element by element); only matrices decay.

    All states are allocated here, so that a checkpoint can be loaded into them.
    """
    named: dict[str, Any] = dict(parameters)  # nn.Parameter with the attribute spec
    groups = [
        {"params": [(n, p) for n, p in named.items() if p.spec.decay], "weight_decay": config.weight_decay},
        {"params": [(n, p) for n, p in named.items() if not p.spec.decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # torch takes an empty list for parameters without names
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
    )
    for parameter in named.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the rate of update ``step``, from 0: linear warm-up, then a cosine that ends at ``schedule_steps``."""
    horizon = config.schedule_steps or steps
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, horizon - config.warmup_steps))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def update(optimizer: torch.optim.AdamW, skipped: torch.Tensor) -> None:
    """Run one step of ``optimizer``. If ``skipped``, a flag on the device, weights and states stay unchanged."""
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]  # GradScaler sets it on fused optimizers
    optimizer.step()


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scale all gradients in place so that their global ``norm`` is at most ``limit`` (0: no limit).

    The norm stays on the device, so the host does not wait for it.
    """
    if limit:
        scale = limit / norm.clamp(min=limit)
        gradients = cast(list[torch.Tensor], [p.grad for p in parameters])  # none is None after a backward
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
