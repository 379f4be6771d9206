"""AdamW and Muon on this rank's shards of the parameters, and clipping by the global norm."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gpt4d.config import OptimConfig
from gpt4d.optim.muon import Muon
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import GROUPS, ParameterSpec

# A width transfer divides AdamW's rate of hidden weights by the relative width m. These are the powers of m that divide
# Muon's rate: updates must keep their singular values, which match_rms_adamw multiplies by sqrt(m).
WIDTH_EXPONENTS = {"match_rms_adamw": 0.5, "original": 0.0}


class Optimizer(torch.optim.Optimizer):
    """AdamW on shards of parameters, since AdamW is elementwise, or Muon on weights of hidden layers.

    Each group of parameters (gpt4d.parallel.layout.GROUPS) has its own learning rate and weight decay. All states are
    allocated here, so that a checkpoint can be loaded into them.

    Args:
        parameters: the parameters to optimize by name, with the attribute ``spec``.
        config: the settings.
        grid: the ranks of the stage; None for AdamW.
        dtype: dtype in which Muon orthogonalizes matrices.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Any]],
        config: OptimConfig,
        grid: Grid | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        named = dict(parameters)
        groups = []
        kinds = {(p.spec.group, p.spec.lr_factor) for p in named.values()}
        for name, lr_factor in sorted(kinds, key=lambda kind: (GROUPS.index(kind[0]), kind[1])):
            members = [(n, p) for n, p in named.items() if (p.spec.group, p.spec.lr_factor) == (name, lr_factor)]
            decay = getattr(config.weight_decays, name)
            by_muon = config.uses_muon and name == "matrices"
            transferred = lr_factor ** WIDTH_EXPONENTS[config.muon.scale] if by_muon else lr_factor
            groups.append(
                {
                    "name": name,
                    "params": members,
                    "lr_factor": getattr(config.lr_factors, name) * transferred,
                    "weight_decay": (config.weight_decay if decay is None else decay) / transferred,
                }
            )
        super().__init__(groups, {"lr": config.lr})
        self.set_learning_rate(config.lr)
        self.muon: Muon | None = None
        elementwise = self.param_groups
        if config.uses_muon:
            assert grid is not None
            shards = {n: p for n, p in named.items() if p.spec.matrices}
            elementwise = [group for group in self.param_groups if group["name"] != "matrices"]
            self.muon = Muon(shards, config.muon, grid, dtype) if shards else None
        # It has the same dictionaries of groups and states.
        self.adamw = torch.optim.AdamW(
            elementwise, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
        )
        self.adamw.state = self.state
        for group in elementwise:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of each group to ``lr`` times the group's factor."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_factor"]

    def shards(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that it optimizes, by name."""
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def states(self) -> dict[str, tuple[torch.Tensor, ParameterSpec]]:
        """Return the states of this rank's shards and their specs, by names in a checkpoint without ``optim.``."""
        found = {
            f"{name}.{key}": (self.state[parameter][key], parameter.spec)
            for name, parameter in self.shards()
            for key in ("exp_avg", "exp_avg_sq")
            if parameter in self.state
        }
        for name, weight in self.muon.weights.items() if self.muon else ():
            found[f"{name}.momentum"] = weight.momentum, weight.rows.spec
        return found

    def set_updates(self, count: int) -> None:
        """Set the number of updates so far, after a checkpoint was loaded into the states."""
        for state in self.state.values():
            state["step"].fill_(count)

    def step(self, skipped: torch.Tensor, norm: torch.Tensor, limit: float) -> None:  # type: ignore[override]
        """Update all parameters with gradients scaled so that their global ``norm`` is at most ``limit``.

        AdamW scales gradients while it reads them, and Muon in a pass over this rank's rows.

        Args:
            skipped: a flag on the device; if it is set, weights and states stay unchanged.
            norm: the norm of all gradients. It stays on the device, so the host does not wait for it.
            limit: the maximum norm; 0 for no limit.
        """
        divisor = (norm / limit).clamp(min=1).float() if limit else None
        fused: Any = self.adamw  # GradScaler sets these attributes on fused optimizers
        fused.found_inf = skipped.float()
        if divisor is not None:
            fused.grad_scale = divisor
        self.adamw.step()
        if self.muon:
            group = next(group for group in self.param_groups if group["name"] == "matrices")
            self.muon.step(group["lr"], group["weight_decay"], skipped, divisor)
