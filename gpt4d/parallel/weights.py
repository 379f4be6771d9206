"""The stream of z-sharded weights: layers take gathered weights from it and hand full gradients back.

A weight is stored split once more over z (Ŵ in the 4D paper's Algorithm 1). A layer needs it gathered when it
multiplies (line 2), and its gradient is summed over z (line 12). gpt4d.parallel.engine.weights decides when to
communicate (§IV):

- OAG: while a layer computes, the weights of the next ones are gathered, in the order of gpt4d.parallel.order.
- ORS: a gradient's reduce-scatter is waited for once the backward is over, or when too many are in flight.
- the cache: weights of chosen blocks stay gathered from the forward until the backward no longer needs them, or for
  the whole step, in which case their gradients are added up before they are summed over z.

Weights that are whole on every rank of z pass through the stream too, without communication.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt4d.config import OverlapConfig
from gpt4d.parallel.collectives import Axis, Pending
from gpt4d.parallel.engine.weights import WeightSchedule
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layout import ParameterSpec, spec_of
from gpt4d.parallel.order import BACKWARD, FORWARD, RECOMPUTATION, WeightUse

# Computes a gradient, adds it in place to an earlier sum of such gradients, if there is one, and returns the result.
GradientTerm = Callable[[torch.Tensor | None], torch.Tensor]

_ALONE = Axis("z")  # of one device: a collective on it returns its input


class WeightStream:
    """Creates the parameters of one stage, gathers their z-shards and reduces their gradients.

    Args:
        grid: the stage's grid.
        compute_dtype: of gathered weights and activations.
        dtype: of the master weights and of their gradients.
        device: where the parameters live.
        overlap: which communication runs beside computation; all of it by default.
        recompute: blocks keep only their input for the backward and are computed again there.
        loss_chunks: parts of the tokens whose logits exist one after another.
        recompute_inputs: products do not keep their inputs, where those are easily computed again.
        num_chunks: parts of a microbatch that take turns in the blocks while the model trains.
        scatter_heads: y splits the heads of attention too, where it divides them.
        sequence_parallel: x splits the tokens between the layers while the model trains.
    """

    def __init__(
        self,
        grid: Grid,
        compute_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        overlap: OverlapConfig | None = None,
        recompute: bool = False,
        num_chunks: int = 1,
        scatter_heads: bool = True,
        sequence_parallel: bool = False,
        recompute_inputs: bool = False,
        loss_chunks: int = 1,
    ):
        self.grid = grid
        self.compute_dtype = compute_dtype
        self.dtype = dtype
        self.device = torch.device(device)
        self.overlap = overlap or OverlapConfig()
        self.recompute, self.recompute_inputs = recompute, recompute_inputs
        self.loss_chunks = loss_chunks
        self._num_chunks, self.scatter_heads = num_chunks, scatter_heads
        self.sequence_parallel = sequence_parallel and grid.x.size > 1
        # Called after each addition to a gradient, and before a gather, to make sure that the shard is up to date.
        self.on_gradient: Callable[[nn.Parameter], None] = lambda shard: None
        self.pre_gather_hook: Callable[[nn.Parameter], None] = lambda shard: None
        self._recomputing = False
        self._delayed: deque[list[Callable[[], None]]] = deque()  # of each backward, its weight gradients to compute
        self._delays = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[nn.Parameter, str] = {}
        self.schedule: WeightSchedule[torch.Tensor, Pending] = WeightSchedule(_TorchWeights(self), self.overlap)

    def head_axes(self, heads: int, stream: str | None = "y") -> tuple[str, ...]:
        """Return the names of the axes that split the heads of an attention, outermost first (``specs.head_axes``)."""
        if stream is None:
            return ()
        return specs.head_axes(heads, self.grid.x.size, self.grid.y.size, self.scatter_heads, stream)

    def parameter(self, spec: ParameterSpec) -> nn.Parameter:
        """Return this rank's part of a new parameter, with the attribute ``spec``. Its values are not set yet."""
        local = torch.empty(self.grid.local_shape(spec.shape, spec.layout), dtype=self.dtype, device=self.device)
        parameter: Any = nn.Parameter(local)
        parameter.spec = spec
        return parameter

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the global names of the parameters, which the order of uses refers to."""
        self._parameters = dict(parameters)
        self._names = {parameter: name for name, parameter in parameters.items()}

    def keep_whole(self, names: Iterable[str]) -> None:
        """Store these weights whole on every rank of z. Call it before they have values."""
        for name in names:
            parameter: Any = self._parameters[name]
            parameter.spec = spec_of(parameter).whole()
            shape = self.grid.local_shape(parameter.spec.shape, parameter.spec.layout)
            parameter.data = torch.empty(shape, dtype=self.dtype, device=self.device)

    def begin(
        self,
        order: Sequence[WeightUse],
        cached: Collection[str] = (),
        cached_for_step: Collection[str] = (),
        terms: Mapping[str, int] | None = None,
    ) -> None:
        """Start a step or an evaluation that uses weights in ``order``. ``finish`` ends it.

        Arguments as for ``WeightSchedule.begin``.
        """
        self.schedule.begin(order, cached, cached_for_step, terms)

    # ------------------------------------------------------------------------------------------ gathering

    @property
    def last_used(self) -> str | None:
        """The name of the weight that a layer has used last in this step, for reports."""
        return self.schedule.last_used

    def gather(self, shard: nn.Parameter) -> torch.Tensor:
        """Return the weight of this rank's (x, y) place for a forward, gathered over z, in the compute dtype."""
        return self._use(RECOMPUTATION if self._recomputing else FORWARD, shard)

    def gather_for_backward(self, shard: nn.Parameter) -> torch.Tensor:
        """Return the weight as ``gather`` does, for a backward."""
        return self._use(BACKWARD, shard)

    @property
    def num_chunks(self) -> int:
        """Parts of a microbatch that take turns: a choice of speed, which a forward without gradients leaves out."""
        return self._num_chunks if torch.is_grad_enabled() else 1

    @property
    def splits_tokens(self) -> bool:
        """Return whether x splits the tokens between the layers; not in a forward without gradients, of any length."""
        return self.sequence_parallel and torch.is_grad_enabled()

    @property
    def recomputes(self) -> bool:
        """Return whether blocks keep only their inputs and are computed again in the backward."""
        return self.recompute and torch.is_grad_enabled()

    @property
    def recomputes_inputs(self) -> bool:
        """Return whether products do not keep inputs that are easily computed again (gpt4d.parallel.recomputation)."""
        return self.recompute_inputs and torch.is_grad_enabled()

    def checkpointed(self, function: Callable, *inputs) -> Any:
        """Call a function of blocks; to recompute it, keep only its inputs and call it again in the backward."""
        if not self.recomputes:
            return function(*inputs)
        # There is no random state to preserve: dropout is a function of its place, not of a generator.
        return checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=self._checkpoint_contexts
        )

    @property
    def recomputation_ends(self) -> bool:
        """Return whether a recomputation is in progress that uses no further weight."""
        following = self.schedule.next_use
        return self._recomputing and following is not None and following.phase != RECOMPUTATION

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._in_recomputation()

    @contextmanager
    def _in_recomputation(self) -> Iterator[None]:
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def _use(self, phase: str, shard: nn.Parameter) -> torch.Tensor:
        return self.schedule.gather(self._name(shard), phase)

    def _name(self, shard: nn.Parameter) -> str:
        """Return a weight's name. A weight that ``bind`` has not named gets a name, which no order contains."""
        if shard not in self._names:
            name = f"unnamed {len(self._names)}"
            self._names[shard], self._parameters[name] = name, shard
        return self._names[shard]

    # ----------------------------------------------------------------------------------------- scattering

    @contextmanager
    def delaying_weight_gradients(self) -> Iterator[None]:
        """Leave out the gradients of streamed weights in a backward: ``compute_delayed_gradients`` computes them."""
        self._delayed.append([])
        self._delays = True
        try:
            yield
        finally:
            self._delays = False

    def compute_delayed_gradients(self) -> None:
        """Compute the weight gradients of the earliest backward that left them out."""
        with torch.no_grad():
            delayed = deque(self._delayed.popleft())
            while delayed:
                delayed.popleft()()  # and forget its tensors

    def add_gradient(self, shard: nn.Parameter, compute: GradientTerm) -> torch.Tensor | None:
        """Compute the gradient of a gathered weight and ``scatter`` it: now, or when the delayed ones are computed.

        The result, None, is the layer's gradient for autograd.
        """
        if self._delays:
            self._delayed[-1].append(lambda: self.scatter(shard, compute))
        else:
            self.scatter(shard, compute)
        return None

    def scatter(self, shard: nn.Parameter, compute: GradientTerm) -> None:
        """Compute the gradient of the gathered weight and add it, summed over z, to ``shard.grad``.

        The sum over z may be added later, but before ``finish`` returns. The backward of a layer passes the parameter
        itself: under activation checkpointing, autograd may hand out a copy, and a gradient stored there is lost.
        """
        self.schedule.scatter(self._name(shard), compute)

    def finish(self) -> None:
        """End a step or an evaluation: every gradient is in place, and no gathered weight outlives the next update."""
        assert not self._delayed, "the program has no action for some weight gradients"
        self.schedule.finish()


class _TorchWeights:
    """The weights of a stream as ``gpt4d.parallel.engine.weights.WeightDevice``."""

    def __init__(self, weights: WeightStream):
        self._stream = weakref.proxy(weights)  # in a cycle, tensors would live until the garbage collector runs

    def is_split(self, weight: str) -> bool:
        return self._axis(self._shard(weight)).size > 1

    def start_gather(self, weight: str) -> Pending:
        """Cast before gathering: a bf16 weight has half the bytes of its master."""
        shard = self._shard(weight)
        self._stream.pre_gather_hook(shard)
        local = shard.detach().to(self._stream.compute_dtype)
        return self._axis(shard).start_all_gather(local, parameter=shard)

    def start_scatter(self, weight: str, gradient: torch.Tensor) -> Pending:
        shard = self._shard(weight)
        return self._axis(shard).start_reduce_scatter(gradient, parameter=shard)

    def wait(self, pending: Pending) -> torch.Tensor:
        return pending.wait()

    def gradient(self, weight: str) -> torch.Tensor | None:
        return self._shard(weight).grad

    def set_gradient(self, weight: str, gradient: torch.Tensor) -> None:
        shard = self._shard(weight)
        shard.grad = gradient
        self._stream.on_gradient(shard)

    def add_gradient(self, weight: str, part: torch.Tensor) -> None:
        shard = self._shard(weight)
        shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._stream.on_gradient(shard)

    def _shard(self, weight: str) -> nn.Parameter:
        return self._stream._parameters[weight]

    def _axis(self, shard: nn.Parameter) -> Axis:
        """Return the axis to gather a weight over."""
        layout = spec_of(shard).layout
        if "z" not in layout.axes:
            return _ALONE
        assert layout.dims[0][-1:] == ("z",), f"z must split the rows of {spec_of(shard)}, innermost"
        return self._stream.grid.z


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of gathered weights and activations for ``train.precision``."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
