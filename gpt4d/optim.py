"""AdamW on this rank's shards of the parameters, the learning-rate schedule, and clipping by the global norm."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpt4d.config import OptimConfig


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW on named parameters or on shards of them, since AdamW is elementwise. Only matrices decay.

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
    least = config.lr * config.min_lr_ratio
    return least + (config.lr - least) * 0.5 * (1 + math.cos(math.pi * progress))


def update(optimizer: torch.optim.AdamW, skipped: torch.Tensor, norm: torch.Tensor, limit: float) -> None:
    """Run one step of ``optimizer`` with gradients scaled so that their global ``norm`` is at most ``limit``.

    Args:
        optimizer: result of ``build_optimizer``. It scales gradients while it reads them, without an additional pass.
        skipped: a flag on the device; if it is set, weights and states stay unchanged.
        norm: the norm of all gradients. It stays on the device, so the host does not wait for it.
        limit: the maximum norm; 0 for no limit.
    """
    fused: Any = optimizer  # GradScaler sets these attributes on fused optimizers
    fused.found_inf = skipped.float()
    if limit:
        fused.grad_scale = (norm / limit).clamp(min=1).float()  # the divisor of the gradients
    optimizer.step()
