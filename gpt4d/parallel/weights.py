"""Weights of a stage as its layers use them: gathered over z on demand, with gradients that are reduce-scattered.

A run uses ShardedWeights (gpt4d.parallel.sharded_weights), and the planner uses SymbolicWeights
(gpt4d.parallel.symbolic.stage). No torch here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.prefetch import BACKWARD, FORWARD, RECOMPUTATION, WeightDevice, WeightSchedule, WeightUse
from gpt4d.parallel.layers.float8 import start_packed_gather
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layout import ParameterSpec

# Computes a gradient, adds it in place to the earlier gradient if that is given, and returns the result.
ComputeGradient = Callable[[Any | None], Any]


class Weights(ABC):
    """Weights of a stage, which are parameters of layers: torch's or symbolic ones.

    Args:
        context: grid and settings of the stage.
        device: starts and completes the communication.

    Attributes:
        schedule: decides when to gather weights and when to reduce-scatter their gradients.
        recomputing: whether the backward is recomputing blocks.
        unpadded_units: the step's global number of units that are no padding.
    """

    def __init__(self, context: Context, device: WeightDevice[Any, Any]):
        self.context = context
        self.schedule: WeightSchedule[Any, Any] = WeightSchedule(device, context.overlap)
        self.recomputing = False
        self.unpadded_units: float = 1.0
        self._delayed: deque[list[Callable[[], None]]] = deque()  # weight gradients to compute, for each backward
        self._delays = False
        self._names: dict[Any, str] = {}

    @abstractmethod
    def add_statistics(self, layer: Any, values: Any) -> None:
        """Add values of a forward to the sums of a layer in the current step."""

    # --------------------------------------------------------------------------------------- recomputation

    @property
    def next_use(self) -> WeightUse | None:
        """Return the use of a weight that follows the last one; None at the end of the order, and without one."""
        return self.schedule.next_use

    @property
    def recomputation_ends(self) -> bool:
        """Return whether a recomputation is in progress that uses no other weight."""
        if not self.recomputing:
            return False
        following = self.next_use
        return following is not None and following.phase != RECOMPUTATION

    def checkpointed(self, function: Callable, *inputs: Any) -> Any:
        """Call a function of blocks, keep only its inputs, and call it again in the backward."""
        return self._checkpointed(function, inputs, self._in_recomputation)

    @abstractmethod
    def _checkpointed(
        self, function: Callable, inputs: Sequence[Any], around: Callable[[], AbstractContextManager]
    ) -> Any:
        """Call a function, keep only its inputs, and call it again in the backward, within the context ``around()``."""

    @contextmanager
    def _in_recomputation(self) -> Iterator[None]:
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    # --------------------------------------------------------------------------------------------- weights

    def gather(self, shard: Any) -> Any:
        """Return the weight at this rank's (x, y) coordinates for a forward, gathered over z, in the compute dtype."""
        return self.schedule.gather(self._name(shard), RECOMPUTATION if self.recomputing else FORWARD)

    def gather_for_backward(self, shard: Any) -> Any:
        """Return the weight as ``gather`` does, for a backward."""
        return self.schedule.gather(self._name(shard), BACKWARD)

    def start_gather(self, shard: Any, spec: ParameterSpec, axis: Any, parameter: Any = None) -> Pending:
        """Start the all-gather of a weight over an axis: in the compute dtype, or packed in float8.

        A bf16 weight has half the bytes of its master, a float8 weight a quarter. Sharded optimizer states leave rows
        that are rounded to the compute dtype (gpt4d.parallel.gradient_reducer). All rows are rounded to it before they
        are rounded to float8, so that ranks of data have equal weights.

        Args:
            shard: values of this rank's shard.
            spec: the weight.
            axis: the axis that splits its rows, innermost.
            parameter: the weight as it is reported.
        """
        local = cast_to(shard, self.context.compute_dtype)
        if self.context.float8 and spec.float8:
            return start_packed_gather(local, axis, parameter)
        return axis.start_all_gather(local, parameter=parameter)

    def _name(self, shard: Any) -> str:
        """Return a weight's name."""
        return self._names[shard]

    # ------------------------------------------------------------------------------------------- gradients

    @abstractmethod
    def trains(self, shard: Any) -> bool:
        """Return whether a weight is trained. A frozen weight has no gradient."""

    @contextmanager
    def delaying_weight_gradients(self) -> Iterator[None]:
        """Delay the gradients of gathered weights in a backward until ``compute_delayed_gradients``."""
        self._delayed.append([])
        self._delays = True
        try:
            yield
        finally:
            self._delays = False

    def delay(self, action: Callable[[], None]) -> None:
        """Delay an action of the current backward until ``compute_delayed_gradients``."""
        self._delayed[-1].append(action)

    def compute_delayed_gradients(self) -> None:
        """Compute the weight gradients of the earliest backward that delayed them."""
        delayed = deque(self._delayed.popleft())
        while delayed:
            delayed.popleft()()  # and forget its tensors

    def add_gradient(self, shard: Any, compute: ComputeGradient) -> None:
        """Compute the gradient of a gathered weight and ``scatter`` it: now, or with the delayed gradients.

        The result, None, is the layer's gradient for autograd.
        """
        if self._delays:
            self.delay(lambda: self.scatter(shard, compute))
        else:
            self.scatter(shard, compute)

    def scatter(self, shard: Any, compute: ComputeGradient) -> None:
        """Compute the gradient of the gathered weight, reduce-scatter it over z and add it to ``shard.grad``.

        The reduce-scatter may end later, but before ``finish`` returns. The backward of a layer passes the parameter
        itself: under activation checkpointing, autograd may provide a copy, and a gradient stored there is lost.
        """
        self.schedule.scatter(self._name(shard), compute)

    def finish(self) -> None:
        """End a step or an evaluation, which ``schedule.begin`` has started.

        Every gradient is in place, and no gathered weight outlives the next update.
        """
        assert not self._delayed, "the program has no action for some weight gradients"
        self.schedule.finish()
