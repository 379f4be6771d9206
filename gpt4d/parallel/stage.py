"""A pipeline stage: a grid on some of the job's ranks, the model chunks that it computes, and its programs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.engine.prefetch import LayerWeights
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.simulation import Program
from gpt4d.parallel.pipeline.stage_links import Exchange
from gpt4d.parallel.sharded_weights import ShardedWeights


@dataclass
class Stage:
    """One stage of the model.

    Attributes:
        index: the stage's index in the pipeline.
        grid: the grid of the stage's ranks.
        weights: the sharded weights of the module.
        module: the stage's model chunks, under global names.
        parts: the boundaries of each model chunk, by virtual stage (gpt4d.model.description.Part).
        layer_weights: the weights that the layers of each model chunk use, in the order of execution.
        contributions: number of contributions of one microbatch to the gradient of each parameter.
        cached: weights that stay gathered from a microbatch's forward until its backward.
        cached_for_step: weights that stay gathered for all microbatches of a step.
        chunk_contributions: number of chunks per microbatch that contribute to a weight's gradient, by weight.
        routers: names and numbers of experts of all routers of the model (gpt4d.parallel.layers.routing.Routers).
        copies: names of the parameters that are copies of another stage's weights, which that stage saves and updates.
        crossing: names of the tensors on each edge of the pipeline, by producing and consuming virtual stage.
        program: returns the stage's program for a step with a given number of microbatches.
        evaluation: returns the stage's program for an evaluation with a given number of microbatches.
        exchange: the edges to other stages; None if there are none.
        evaluation_exchange: the edges in an evaluation, where x does not split tokens.
    """

    index: int
    grid: Grid
    weights: ShardedWeights
    module: nn.Module
    parts: Mapping[int, Any]
    layer_weights: Mapping[int, Sequence[LayerWeights]]
    contributions: dict[str, int]
    cached: Collection[str]
    cached_for_step: Collection[str]
    chunk_contributions: Mapping[str, int]
    routers: Mapping[str, int]
    copies: Collection[str]
    crossing: Mapping[tuple[int, int], Sequence[str]]
    program: Callable[[int], Program]
    evaluation: Callable[[int], Program]
    exchange: Exchange | None = None
    evaluation_exchange: Exchange | None = None

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes and links on which this rank communicates, by name."""
        return {**self.grid.active_axes, **(self.exchange.axes if self.exchange else {})}

    @property
    def batch_shards(self) -> int:
        """The number that divides every batch size, so that each stage can split a batch among its batch shards."""
        return self.exchange.batch_shards if self.exchange else self.grid.sizes.batch_shards

    def send_copied_weights(self) -> None:
        """Start to send weights to the stages that have copies of them. The next forward waits for the copies.

        Rows of a copy may be rounded to the compute dtype (GradientReducer), to which its layers cast it anyway. All
        ranks must call this function after the weights have changed.
        """
        if self.exchange is None:
            return
        parameters = dict(self.module.named_parameters())
        for copy in self.exchange.copies:
            parameter = parameters[copy.name]
            if copy.name in self.exchange.owned:
                self.weights.pre_gather_hook(parameter)
            self.exchange.start_weight(copy.name, parameter.detach())

    def wait_for_copies(self) -> None:
        """Wait until all transfers that ``send_copied_weights`` has started are complete."""
        if self.exchange is not None:
            self.exchange.wait_for_owned()
            self.exchange.wait_for_held()

    def sources(self, virtual_stage: int) -> list[int]:
        """Return the virtual stages that produce tensors for a virtual stage of this stage."""
        return [source for source, target in self.crossing if target == virtual_stage]

    def targets(self, virtual_stage: int) -> list[int]:
        """Return the virtual stages that use tensors of a virtual stage of this stage."""
        return [target for source, target in self.crossing if source == virtual_stage]
