"""A pipeline stage: a grid on some of the job's ranks, the parts of the model that they compute, and its programs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.engine.prefetch import LayerWeights
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.stage_links import Exchange
from gpt4d.parallel.pipeline.stage_program import Program
from gpt4d.parallel.sharded_weights import ShardedWeights


@dataclass
class Stage:
    """One stage of the model.

    Attributes:
        index: its place in the pipeline.
        grid: its ranks.
        weights: the stream that its module takes weights from.
        module: its parts of the model, under global names.
        parts: each part's boundaries, by virtual stage (gpt4d.model.description.Part).
        layer_weights: weights that the layers of each part use, in the order of execution.
        terms: number of terms that one microbatch adds to the gradient of each parameter.
        cached: weights that stay gathered from a microbatch's forward until its backward.
        cached_for_step: weights that stay gathered for all microbatches of a step.
        chunk_terms: for weights that chunks of a microbatch use, their number: each adds a term to the gradient.
        crossing: names of the tensors on each edge of the pipeline, by the virtual stages that produce and use them.
        exchange: its edges to other stages; None if there are none.
        evaluation_exchange: the same edges in an evaluation, where x does not split tokens.
        program: returns what this stage does in a step of some microbatches.
        evaluation: returns what it does in an evaluation of some microbatches.
    """

    index: int
    grid: Grid
    weights: ShardedWeights
    module: nn.Module
    parts: Mapping[int, Any]
    layer_weights: Mapping[int, Sequence[LayerWeights]]
    terms: dict[str, int]
    cached: Collection[str] = ()
    cached_for_step: Collection[str] = ()
    chunk_terms: Mapping[str, int] = field(default_factory=dict)
    crossing: Mapping[tuple[int, int], Sequence[str]] = field(default_factory=dict)
    exchange: Exchange | None = None
    evaluation_exchange: Exchange | None = None
    program: Callable[[int], Program] = lambda microbatches: [*schedule.single_stage(microbatches)]
    evaluation: Callable[[int], Program] = lambda microbatches: [*schedule.forward_only(microbatches)]

    @property
    def axes(self) -> dict[str, Axis]:
        """Everything on which this rank communicates, by name."""
        return {**self.grid.active_axes, **(self.exchange.axes if self.exchange else {})}

    @property
    def copies(self) -> list[str]:
        """Names of the parameters that another stage has too, updates and saves."""
        return self.exchange.held if self.exchange else []

    def send_copied_weights(self) -> None:
        """Start to send weights to the stages that have copies of them; a forward waits for its own.

        All ranks call this function after the weights have changed.
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
        """Wait until the weights that ``send_copied_weights`` sends or receives may be read and changed."""
        if self.exchange is not None:
            self.exchange.wait_for_owned()
            self.exchange.wait_for_held()

    def sources(self, virtual_stage: int) -> list[int]:
        """Return the virtual stages whose tensors a part of this stage uses."""
        return [source for source, target in self.crossing if target == virtual_stage]

    def targets(self, virtual_stage: int) -> list[int]:
        """Return the virtual stages that use tensors of a part of this stage."""
        return [target for source, target in self.crossing if source == virtual_stage]
