"""The stream of z-sharded weights: layers take whole weights from it and hand whole gradients back.

A weight is stored cut once more over z (Ŵ in the 4D paper's Algorithm 1). A layer gathers it just before it multiplies
(line 2) and scatters the gradient just after (line 12). What of this happens early, late or not at all is decided here;
layers only say what they need.
"""

from dataclasses import dataclass

import torch
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is as a global tensor, whatever part of it a rank holds."""

    shape: tuple[int, ...]
    layout: Layout
    mean: float = 0.0  # initial values are mean + std · normal
    std: float = 0.0
    decay: bool = False  # weight decay applies: matrices


class WeightStream:
    """Creates the parameters of one stage, gathers their z-shards and takes in their gradients.

    ``dtype`` is that of the master weights and of the gradients, ``compute_dtype`` that of gathered weights and
    activations.
    """

    def __init__(
        self,
        grid: Grid,
        compute_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.grid = grid
        self.compute_dtype = compute_dtype
        self.dtype = dtype
        self.device = torch.device(device)

    def parameter(self, shape: tuple[int, ...], layout: Layout, **spec) -> nn.Parameter:
        """This rank's part of a new parameter, its values yet unset, with the attribute ``spec``."""
        local = torch.empty(self.grid.local_shape(shape, layout), dtype=self.dtype, device=self.device)
        parameter = nn.Parameter(local)
        parameter.spec = ParameterSpec(tuple(shape), layout, **spec)
        return parameter

    def gather(self, shard: nn.Parameter) -> torch.Tensor:
        """The weight of this rank's (x, y) place, whole over z, in the compute dtype.

        Cast first, gathered then: a bf16 weight is half the bytes of its master.
        """
        assert shard.spec.layout.dims[0][-1:] == ("z",), f"z is to split the rows of {shard.spec}, innermost"
        return collectives.all_gather(shard.detach().to(self.compute_dtype), self.grid.z)

    def scatter(self, shard: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds the gradient of the whole weight, summed over z, to ``shard.grad``.

        Called from the layers' backwards with the parameter itself: what autograd hands around under activation
        checkpointing may be a copy, and a gradient stored there is lost.
        """
        part = collectives.start_reduce_scatter(gradient.to(self.dtype), self.grid.z).wait()
        shard.grad = part if shard.grad is None else shard.grad.add_(part)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Of gathered weights and activations; ``train.precision``."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
