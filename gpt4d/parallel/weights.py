"""The stream of z-sharded weights: layers take whole weights from it and hand whole gradients back.

A weight is stored cut once more over z (Ŵ in the 4D paper's Algorithm 1). A layer needs it whole when it multiplies
(line 2), and what it gives back is summed over z (line 12). When that communication happens is decided here (§IV):

- OAG: while a layer computes, the weight of the next one is gathered. Which is next was observed the last time.
- ORS: a gradient's reduce-scatter is waited for once the backward is over, or when too many are under way.
- the cache: weights of chosen layers stay whole from the forward until the backward is through with them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from gpt4d.config import OverlapConfig
from gpt4d.parallel import collectives
from gpt4d.parallel.collectives import Pending
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.limits import MAX_INFLIGHT_REDUCE_SCATTERS


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is as a global tensor, whatever part of it a rank holds."""

    shape: tuple[int, ...]
    layout: Layout
    mean: float = 0.0  # initial values are mean + std · normal
    std: float = 0.0
    decay: bool = False  # weight decay applies: matrices


class _Use(NamedTuple):
    """One use of a weight in a step. The same weight is used in a forward, a recomputation and a backward."""

    phase: str
    shard: nn.Parameter

    def __hash__(self) -> int:
        return hash((self.phase, id(self.shard)))

    def __eq__(self, other) -> bool:
        return self.phase == other.phase and self.shard is other.shard


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
        overlap: OverlapConfig | None = None,
    ):
        self.grid = grid
        self.compute_dtype = compute_dtype
        self.dtype = dtype
        self.device = torch.device(device)
        self.overlap = overlap or OverlapConfig()
        self.on_gradient: Callable[[nn.Parameter], None] = lambda shard: None  # told of each addition to a gradient
        self.pre_gather_hook: Callable[[nn.Parameter], None] = lambda shard: None  # makes sure that it is up to date
        self._cached: set[nn.Parameter] = set()
        self._recomputing = False
        self._here: dict[nn.Parameter, Pending] = {}  # whole weights, or on their way, that will be asked for
        self._scattering: deque[tuple[nn.Parameter, Pending]] = deque()
        self._next: dict[tuple[_Use | None, _Use], _Use | None] = {}  # what followed on the last two uses
        self._last: tuple[_Use | None, _Use | None] = (None, None)

    def parameter(self, shape: tuple[int, ...], layout: Layout, **spec) -> nn.Parameter:
        """This rank's part of a new parameter, its values yet unset, with the attribute ``spec``."""
        local = torch.empty(self.grid.local_shape(shape, layout), dtype=self.dtype, device=self.device)
        parameter = nn.Parameter(local)
        parameter.spec = ParameterSpec(tuple(shape), layout, **spec)
        return parameter

    # ------------------------------------------------------------------------------------------ gathering

    def gather(self, shard: nn.Parameter, again: bool) -> torch.Tensor:
        """For a forward: the weight of this rank's (x, y) place, whole over z, in the compute dtype.

        ``again``: the backward of this layer will ask for it once more, through ``gather_for_backward``.
        """
        use = _Use("recomputation" if self._recomputing else "forward", shard)
        following = self._observe(use)
        weight = self._take(shard)
        # Kept: what was chosen to be, and what the backward asks for next or nearly next.
        soon = self._recomputing or (following is not None and following.shard is shard)
        if again and (soon or shard in self._cached):
            self._here[shard] = Pending(weight)
        self._prefetch(use)
        return weight

    def gather_for_backward(self, shard: nn.Parameter) -> torch.Tensor:
        """The same for the backward, the last use of the weight before the next forward."""
        use = _Use("backward", shard)
        self._observe(use)
        weight = self._take(shard)
        self._prefetch(use)
        return weight

    def cache(self, module: nn.Module) -> None:
        """Keeps the gathered weights of a module from its forward until its backward, in each step from now on."""
        self._cached.update(module.parameters())

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """For torch's activation checkpointing (``context_fn``): tells a recomputation from a forward."""
        return nullcontext(), self._in_recomputation()

    @contextmanager
    def _in_recomputation(self) -> Iterator[None]:
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def _take(self, shard: nn.Parameter) -> torch.Tensor:
        return (self._here.pop(shard, None) or self._start_gather(shard)).wait()

    def _start_gather(self, shard: nn.Parameter) -> Pending:
        """Cast first, gathered then: a bf16 weight is half the bytes of its master."""
        assert shard.spec.layout.dims[0][-1:] == ("z",), f"z is to split the rows of {shard.spec}, innermost"
        self.pre_gather_hook(shard)
        return collectives.start_all_gather(shard.detach().to(self.compute_dtype), self.grid.z)

    def _observe(self, use: _Use) -> _Use | None:
        """Notes that ``use`` followed on the last two, and returns what followed on it the last time."""
        before, last = self._last
        if last is not None:
            # After a backward comes either the next microbatch or the end of the step: nothing to count on.
            ends = last.phase == "backward" and use.phase == "forward"
            self._next[before, last] = None if ends else use
        self._last = (last, use)
        return self._next.get((last, use))

    def _prefetch(self, use: _Use) -> None:
        """Starts gathering the weights of the next ``prefetch`` uses that are not here yet."""
        if not self.overlap.all_gather or self.grid.z.size == 1:
            return
        before = self._last[0]
        for _ in range(self.overlap.prefetch):
            following = self._next.get((before, use))
            if following is None:
                return
            if following.shard not in self._here:
                self._here[following.shard] = self._start_gather(following.shard)
            before, use = use, following

    # ----------------------------------------------------------------------------------------- scattering

    def scatter(self, shard: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds the gradient of the whole weight, summed over z, to ``shard.grad``: by ``finish`` at the latest.

        Called from the layers' backwards with the parameter itself: what autograd hands around under activation
        checkpointing may be a copy, and a gradient stored there is lost.
        """
        pending = collectives.start_reduce_scatter(gradient.to(self.dtype), self.grid.z)
        self._scattering.append((shard, pending))
        under_way = MAX_INFLIGHT_REDUCE_SCATTERS if self.overlap.reduce_scatter and self.grid.z.size > 1 else 0
        while len(self._scattering) > under_way:
            self._add_gradient(*self._scattering.popleft())

    def _add_gradient(self, shard: nn.Parameter, pending: Pending) -> None:
        part = pending.wait()
        shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self.on_gradient(shard)

    def finish(self) -> None:
        """Ends a step's backward: every gradient is in place, and no gathered weight outlives the coming update."""
        while self._scattering:
            self._add_gradient(*self._scattering.popleft())
        for pending in self._here.values():  # gathered in vain: the order was another than the last time
            pending.wait()
        self._here.clear()
        self._last = (None, None)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Of gathered weights and activations; ``train.precision``."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
