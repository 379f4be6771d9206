"""Layers of a mixture of experts: settings, weights, tokens, and the experts of each token, equal for all frameworks.

Each layer adds the output of its experts to its input. A router computes the weights of a token's experts. Which
experts these are is drawn in advance, so every contender has the same numbers of tokens per expert. On virtual devices
a router could not choose: the values of its products are meaningless.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.gradient_steps import global_tensor
from benchmarks.settings import DeviceConfig, arguments_of

_STD = 0.05  # standard deviation of all weights, with which the gradients of routers are not tiny


@dataclass
class MoeConfig(DeviceConfig):
    """The layers, and the tokens of a step over all ranks."""

    layers: int = 4
    hidden: int = 512
    inner: int = 1344  # features within an expert; 8/3 · hidden, as in a Llama of this size
    experts: int = 8
    per_token: int = 2  # experts of a token
    tokens: int = 2048
    mbit: float = 200.0
    virtual: bool = True

    @cached_property
    def work(self) -> "MoeWork":
        return MoeWork(self)


@dataclass
class MoeWorkerConfig(MoeConfig):
    grids: str = ""  # grids that the worker runs, separated by commas
    gradients: str = ""  # directory for gradients, which are stored in place of measuring time; empty: measure time


def worker_arguments(settings: MoeConfig, grids: str = "", **changes: object) -> tuple[str, ...]:
    """Return the command-line arguments from which a worker reads its ``MoeWorkerConfig``."""
    return arguments_of(settings, MoeConfig, grids=grids, **changes)


class MoeWork:
    """The global tensors of a step.

    Attributes:
        weights: by name, such as ``2.up``: ``router`` [H, E], ``up`` [E, H, 2, N], ``down`` [E, N, H].
        inputs: [T, H].
        upstream: gradient of the output of the last layer, [T, H].
        routes: the experts of each token in each layer, [T, L, K].
    """

    def __init__(self, config: MoeConfig):
        self.config, generator = config, torch.Generator().manual_seed(0)
        hidden, inner, experts = config.hidden, config.inner, config.experts
        shapes = {"router": (hidden, experts), "up": (experts, hidden, 2, inner), "down": (experts, inner, hidden)}
        self.weights = {
            f"{layer}.{name}": torch.randn(shape, generator=generator) * _STD
            for layer in range(config.layers or 0)
            for name, shape in shapes.items()
        }
        self.inputs, self.upstream = torch.randn(2, config.tokens, hidden, generator=generator)
        # Not drawn by torch: large tensors have no values on a virtual device.
        draw = random.Random(0)
        self.routes = torch.tensor(
            [
                [draw.sample(range(experts), config.per_token) for _ in range(config.layers or 0)]
                for _ in range(config.tokens)
            ]
        )

    def place(self, index: int, shares: int) -> slice:
        """Return the tokens of share ``index`` of ``shares``."""
        size = self.config.tokens // shares
        return slice(index * size, (index + 1) * size)


def token_tensors(output: torch.Tensor, inputs: torch.Tensor, work: MoeWork, place: tuple[slice, ...]) -> dict:
    """Return the global output of the last layer and the gradient of the inputs, whose part at ``place`` a rank has."""
    assert inputs.grad is not None
    shape = work.inputs.shape
    return {
        "output": global_tensor(output.detach(), shape, place),
        "input": global_tensor(inputs.grad, shape, place),
    }
