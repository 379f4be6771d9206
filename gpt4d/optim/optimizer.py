"""AdamW and Muon on this rank's shards of the parameters, and clipping by the global norm."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from gpt4d.config import OptimConfig
from gpt4d.optim.muon import Muon
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import GROUPS, ParameterSpec

# A width transfer divides AdamW's rate of hidden weights by the relative width m. These are the powers of m that divide
# Muon's rate: updates must keep their singular values, which match_rms_adamw multiplies by sqrt(m).
WIDTH_EXPONENTS = {"match_rms_adamw": 0.5, "original": 0.0}


class Group(NamedTuple):
    """Parameters with the same learning rate and weight decay.

    Attributes:
        name: one of gpt4d.parallel.layout.GROUPS.
        parameters: the parameters by name, with the attribute ``spec``.
        lr_factor: factor of the learning rate.
        weight_decay: the weight decay, relative to the learning rate.
        by_muon: Muon updates the parameters, not AdamW.
    """

    name: str
    parameters: dict[str, Any]
    lr_factor: float
    weight_decay: float
    by_muon: bool


class Optimizer:
    """AdamW on shards of parameters, since AdamW is elementwise, or Muon on weights of hidden layers.

    Each group of parameters (gpt4d.parallel.layout.GROUPS) has its own learning rate and weight decay. All states are
    allocated here, so that a checkpoint can be loaded into them. This is no torch.optim.Optimizer, whose constructor
    imports torch's compiler in seconds, which takes 0.12 GiB.

    Args:
        parameters: the parameters to optimize by name, with the attribute ``spec``.
        config: the settings.
        grid: the ranks of the stage; None for AdamW.
        dtype: dtype in which Muon orthogonalizes matrices.

    Attributes:
        lr: the learning rate, which each group multiplies by its factor.
        state: the number of updates and the moments of each parameter that AdamW updates.
        around_step: returns a context of each update.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Any]],
        config: OptimConfig,
        grid: Grid | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        named = dict(parameters)
        self.config, self.lr, self.groups = config, config.lr, list[Group]()
        self.around_step: Callable[[], AbstractContextManager] = nullcontext
        kinds = {(p.spec.group, p.spec.lr_factor) for p in named.values()}
        for name, lr_factor in sorted(kinds, key=lambda kind: (GROUPS.index(kind[0]), kind[1])):
            members = {n: p for n, p in named.items() if (p.spec.group, p.spec.lr_factor) == (name, lr_factor)}
            decay = getattr(config.weight_decays, name)
            by_muon = config.uses_muon and name == "matrices"
            transferred = lr_factor ** WIDTH_EXPONENTS[config.muon.scale] if by_muon else lr_factor
            rate = getattr(config.lr_factors, name) * transferred
            decay = (config.weight_decay if decay is None else decay) / transferred
            self.groups.append(Group(name, members, rate, decay, by_muon))
        self.muon: Muon | None = None
        if config.uses_muon:
            assert grid is not None
            shards = {n: p for n, p in named.items() if p.spec.matrices}
            self.muon = Muon(shards, config.muon, grid, dtype) if shards else None
        self.state = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            for group in self.groups
            if not group.by_muon
            for parameter in group.parameters.values()
        }

    def shards(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that it optimizes, by name."""
        for group in self.groups:
            yield from group.parameters.items()

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

    @torch.no_grad()
    def step(self, skipped: torch.Tensor, norm: torch.Tensor, limit: float) -> None:
        """Update all parameters with gradients scaled so that their global ``norm`` is at most ``limit``.

        AdamW scales gradients while it reads them, and Muon in a pass over this rank's rows.

        Args:
            skipped: a flag on the device; if it is set, weights and states stay unchanged.
            norm: the norm of all gradients. It stays on the device, so the host does not wait for it.
            limit: the maximum norm; 0 for no limit.
        """
        divisor = (norm / limit).clamp(min=1).float() if limit else None
        found_inf = skipped.float()
        with self.around_step():
            for group in self.groups:
                if not group.by_muon:
                    self._update_by_adamw(group, found_inf, divisor)
            if self.muon:
                group = next(group for group in self.groups if group.by_muon)
                self.muon.step(self.lr * group.lr_factor, group.weight_decay, skipped, divisor)

    def _update_by_adamw(self, group: Group, found_inf: torch.Tensor, divisor: torch.Tensor | None) -> None:
        config, parameters = self.config, [*group.parameters.values()]
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=divisor,
            found_inf=found_inf,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=self.lr * group.lr_factor,
            weight_decay=group.weight_decay,
            eps=config.epsilon,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Free all gradients."""
        for _, parameter in self.shards():
            parameter.grad = None
