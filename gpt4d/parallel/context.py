"""The context of a stage's layers: its grid, its settings and its gathered weights. No torch here.

A run uses the sharded weights (gpt4d.parallel.sharded_weights), and the planner uses gpt4d.parallel.symbolic.context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpt4d.config import OverlapConfig
from gpt4d.parallel.engine.prefetch import BACKWARD, FORWARD, RECOMPUTATION, WeightDevice, WeightSchedule, WeightUse
from gpt4d.parallel.layers import sharding

# Computes a gradient, adds it in place to the earlier gradient if that is given, and returns the result.
GradientTerm = Callable[[Any | None], Any]


class Context(ABC):
    """The context of a stage. Weights are parameters of layers, torch's or symbolic ones.

    Attributes:
        grid: the stage's grid, with an axis by each name.
        compute_dtype: of gathered weights and activations.
        overlap: which communication overlaps with computation.
        recompute: blocks keep only their input for the backward and are computed again there.
        recompute_inputs: products do not keep their inputs, where those are easily computed again.
        loss_chunks: chunks of the tokens; the logits of one chunk exist at a time.
        scatter_heads: y splits the heads of attention too, where it divides them.
        sequence_parallel: x splits the tokens between the layers while the model trains.
        schedule: decides when weights are gathered and when their gradients are summed.
    """

    def __init__(
        self,
        grid: Any,
        compute_dtype: Any,
        device: WeightDevice[Any, Any],
        overlap: OverlapConfig,
        recompute: bool,
        num_chunks: int,
        scatter_heads: bool,
        sequence_parallel: bool,
        recompute_inputs: bool,
        loss_chunks: int,
    ):
        self.grid, self.compute_dtype, self.overlap = grid, compute_dtype, overlap
        self.recompute, self.recompute_inputs, self.loss_chunks = recompute, recompute_inputs, loss_chunks
        self._num_chunks, self.scatter_heads = num_chunks, scatter_heads
        self.sequence_parallel = sequence_parallel and grid.x.size > 1
        self.schedule: WeightSchedule[Any, Any] = WeightSchedule(device, overlap)
        self.recomputing = False  # now
        self._delayed: deque[list[Callable[[], None]]] = deque()  # the weight gradients to compute, for each backward
        self._delays = False
        self._names: dict[Any, str] = {}

    @property
    @abstractmethod
    def records_gradients(self) -> bool:
        """Return whether the current forward is followed by a backward."""

    @abstractmethod
    def _checkpointed(
        self, function: Callable, inputs: Sequence[Any], around: Callable[[], AbstractContextManager]
    ) -> Any:
        """Call a function, keep only its inputs, and call it again in the backward, within the context ``around()``."""

    def head_axes(self, heads: int, stream: str | None = "y") -> tuple[str, ...]:
        """Return the names of the axes that split the heads of an attention, outermost first (``specs.head_axes``)."""
        if stream is None:
            return ()
        return sharding.head_axes(heads, self.grid.x.size, self.grid.y.size, self.scatter_heads, stream)

    @property
    def num_chunks(self) -> int:
        """Chunks of a microbatch that are interleaved for speed; one in a forward without gradients."""
        return self._num_chunks if self.records_gradients else 1

    @property
    def splits_tokens(self) -> bool:
        """Return whether x splits the tokens between the layers; not in a forward without gradients, of any length."""
        return self.sequence_parallel and self.records_gradients

    @property
    def recomputes(self) -> bool:
        """Return whether blocks keep only their inputs and are computed again in the backward."""
        return self.recompute and self.records_gradients

    @property
    def recomputes_inputs(self) -> bool:
        """Return whether products do not keep inputs that are easily computed again (gpt4d.parallel.layers.product)."""
        return self.recompute_inputs and self.records_gradients

    def checkpointed(self, function: Callable, *inputs: Any) -> Any:
        """Call a function of blocks; to recompute it, keep only its inputs and call it again in the backward."""
        return self._checkpointed(function, inputs, self._in_recomputation) if self.recomputes else function(*inputs)

    @contextmanager
    def _in_recomputation(self) -> Iterator[None]:
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    @property
    def next_use(self) -> WeightUse | None:
        """The use of a weight that follows the last one; None at the end of the order, and without one."""
        return self.schedule.next_use

    @property
    def recomputation_ends(self) -> bool:
        """Return whether a recomputation is in progress that uses no further weight."""
        following = self.next_use
        return self.recomputing and following is not None and following.phase != RECOMPUTATION

    # -------------------------------------------------------------------------------------------- weights

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

    @property
    def last_used(self) -> str | None:
        """The name of the weight that a layer has used last in this step, for reports."""
        return self.schedule.last_used

    def gather(self, shard: Any) -> Any:
        """Return the weight of this rank's (x, y) place for a forward, gathered over z, in the compute dtype."""
        return self.schedule.gather(self._name(shard), RECOMPUTATION if self.recomputing else FORWARD)

    def gather_for_backward(self, shard: Any) -> Any:
        """Return the weight as ``gather`` does, for a backward."""
        return self.schedule.gather(self._name(shard), BACKWARD)

    def _name(self, shard: Any) -> str:
        """Return a weight's name."""
        return self._names[shard]

    # ------------------------------------------------------------------------------------------ gradients

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
        delayed = deque(self._delayed.popleft())
        while delayed:
            delayed.popleft()()  # and forget its tensors

    def add_gradient(self, shard: Any, compute: GradientTerm) -> None:
        """Compute the gradient of a gathered weight and ``scatter`` it: now, or when the delayed ones are computed.

        The result, None, is the layer's gradient for autograd.
        """
        if self._delays:
            self._delayed[-1].append(lambda: self.scatter(shard, compute))
        else:
            self.scatter(shard, compute)

    def scatter(self, shard: Any, compute: GradientTerm) -> None:
        """Compute the gradient of the gathered weight, reduce-scatter it over z and add it to ``shard.grad``.

        The reduce-scatter may end later, but before ``finish`` returns. The backward of a layer passes the parameter
        itself: under activation checkpointing, autograd may hand out a copy, and a gradient stored there is lost.
        """
        self.schedule.scatter(self._name(shard), compute)

    def finish(self) -> None:
        """End a step or an evaluation: every gradient is in place, and no gathered weight outlives the next update."""
        assert not self._delayed, "the program has no action for some weight gradients"
        self.schedule.finish()
