"""Weights of a stage as its layers use them: gathered over z on demand, with gradients that are reduce-scattered.

A run uses ShardedWeights (gpt4d.parallel.sharded_weights), and the planner uses SymbolicWeights
(gpt4d.parallel.symbolic.stage). No torch here.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

from gpt4d.parallel.comm.pending import MeshAxis, Pending
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.prefetch import ComputeGradient, WeightSchedule
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.float8 import start_packed_gather
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layout import ParameterSpec


class Weights(ABC):
    """Weights of a stage, which are parameters of layers: torch's or symbolic ones.

    Layers pass parameters to it, and its schedule passes their names (gpt4d.parallel.engine.prefetch.WeightDevice).

    Attributes:
        context: grid and settings of the stage.
        schedule: decides when to gather weights and when to reduce-scatter their gradients.
        specs: the specs of the weights, by name.
    """

    def __init__(self, context: Context):
        self.context, self._alone = context, context.grid.axis(None)
        # Weak, because in a reference cycle tensors live until the garbage collector runs.
        self.schedule: WeightSchedule[Any, Pending] = WeightSchedule(weakref.proxy(self), context.overlap)
        self.specs: dict[str, ParameterSpec] = {}
        self._shards: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of the shards

    @abstractmethod
    def current_shard(self, weight: str) -> Tensor:
        """Return this device's shard of a weight after the arrival of rows that other ranks have updated."""

    def _name(self, shard: Any) -> str:
        """Return a weight's name."""
        return self._names[shard]

    def trains(self, shard: Tensor) -> bool:
        """Return whether a weight is trained. A frozen weight has no gradient."""
        return not self.specs[self._name(shard)].frozen

    def gather(self, shard: Tensor, phase: str | None = None) -> Tensor:
        """Return the weight at this rank's (x, y) coordinates, gathered over z, in the compute dtype.

        ``phase``: as for ``WeightSchedule.gather``.
        """
        return self.schedule.gather(self._name(shard), phase)

    def add_gradient(self, shard: Tensor, compute: ComputeGradient) -> None:
        """Compute the gradient of a gathered weight and ``scatter`` it: now, or with the delayed gradients.

        The result, None, is the layer's gradient for autograd.
        """
        self.schedule.add_gradient(self._name(shard), compute)

    def scatter(self, shard: Tensor, compute: ComputeGradient) -> None:
        """Compute the gradient of the gathered weight, reduce-scatter it over z and add it to ``shard.grad``.

        The reduce-scatter may end later, but before ``schedule.finish`` returns. The backward of a layer passes the
        parameter itself: under activation checkpointing, autograd may provide a copy, and a gradient stored there is
        lost.
        """
        self.schedule.scatter(self._name(shard), compute)

    # ------------------------------------------------- the operations of gpt4d.parallel.engine.prefetch.WeightDevice

    def is_split(self, weight: str) -> bool:
        return self._axis(weight).size > 1

    def start_gather(self, weight: str) -> Pending:
        """Start the all-gather of a weight: in the compute dtype, or packed in float8.

        A bf16 weight has half the bytes of its master, a float8 weight a quarter. Sharded optimizer states leave rows
        that are rounded to the compute dtype (gpt4d.parallel.gradient_reducer). All rows are rounded to it before they
        are rounded to float8, so that ranks of data have equal weights.
        """
        context, axis, shard = self.context, self._axis(weight), self.current_shard(weight)
        local = cast_to(shard.detach(), context.compute_dtype)
        if context.float8 and self.specs[weight].float8:
            return start_packed_gather(local, axis, shard)
        return axis.start_all_gather(local, parameter=shard)

    def start_scatter(self, weight: str, gradient: Tensor) -> Pending:
        return self._axis(weight).start_reduce_scatter(gradient, parameter=self._shards[weight])

    def wait(self, pending: Pending) -> Tensor:
        return pending.wait()

    def _axis(self, weight: str) -> MeshAxis:
        return self.context.grid.z if self.specs[weight].gathered else self._alone
