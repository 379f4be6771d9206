"""A pipeline stage: a grid on some of the job's ranks, the module they compute, and the runtime of its schedule."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpt4d.parallel.gradients import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.order import LayerWeights, weight_order
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.weights import WeightStream


@dataclass
class Stage:
    """One stage of the model. Activations at its edges have the layout ``Description.stream`` on its grid.

    Attributes:
        index: its place in the pipeline.
        grid: its ranks.
        weights: the stream that its module takes weights from.
        module: its part of the model, under global names.
        layer_weights: weights that its layers use, in the order of execution.
        terms: number of terms that one microbatch adds to the gradient of each parameter.
        cached: weights that stay gathered from a microbatch's forward until its backward.
        cached_for_step: weights that stay gathered for all microbatches of a step.
        chunk_terms: for weights that chunks of a microbatch use, their number: each adds a term to the gradient.
    """

    index: int
    grid: Grid
    weights: WeightStream
    module: nn.Module
    layer_weights: Sequence[LayerWeights]
    terms: dict[str, int]
    cached: Collection[str] = ()
    cached_for_step: Collection[str] = ()
    chunk_terms: Mapping[str, int] = field(default_factory=dict)


class StageRuntime:
    """Executes the schedule of a stage.

    Args:
        stage: what this rank computes.
        reducer: sums the stage's gradients.
        loss_sum: returns the loss of a microbatch, summed over this rank's samples, from the module and the batch.
    """

    def __init__(self, stage: Stage, reducer: GradientReducer, loss_sum: Callable[[nn.Module, Any], torch.Tensor]):
        self.stage, self.reducer, self.loss_sum = stage, reducer, loss_sum

    def forward_backward(self, batches: Iterable[Any], microbatches: int, divisor: float) -> torch.Tensor:
        """Compute the forwards and backwards of a step; gradients are complete when it returns.

        Args:
            batches: this rank's microbatches.
            microbatches: how many there are.
            divisor: global number of units (tokens, images) of the step: how the batch is dealt out to ranks and
                microbatches makes no difference.

        Returns:
            The sum of this rank's losses over ``divisor``, float64, on the device.
        """
        stage = self.stage
        actions = schedule.single_stage(microbatches)
        terms = {name: count * microbatches for name, count in stage.terms.items()}
        added = {name: terms[name] * stage.chunk_terms.get(name, 1) for name in stage.cached_for_step}
        order = weight_order(actions, stage.layer_weights, stage.chunk_terms)
        stage.weights.begin(order, stage.cached, stage.cached_for_step, {**stage.chunk_terms, **added})
        self.reducer.begin(terms | dict.fromkeys(stage.cached_for_step, 1))
        stage.module.train()
        total = torch.zeros((), dtype=torch.float64, device=stage.weights.device)
        remaining = iter(batches)
        in_flight: dict[int, torch.Tensor] = {}
        for kind, microbatch, _ in actions:
            if kind == "F":
                in_flight[microbatch] = self.loss_sum(stage.module, next(remaining)) / divisor
                total += in_flight[microbatch].detach()
            else:
                in_flight.pop(microbatch).backward()
        self.reducer.finish()
        return total

    def evaluate(self, batches: Iterable[Any], microbatches: int) -> torch.Tensor:
        """Return the sum of this rank's losses over some microbatches, float64, without gradients."""
        stage = self.stage
        stage.weights.begin(weight_order(schedule.forward_only(microbatches), stage.layer_weights))
        stage.module.eval()
        total = torch.zeros((), dtype=torch.float64, device=stage.weights.device)
        with torch.no_grad():
            for batch in batches:
                total += self.loss_sum(stage.module, batch)
        stage.weights.finish()
        return total
