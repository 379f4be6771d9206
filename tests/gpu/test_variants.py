"""Check 10: cost of some decisions, each reverted in alternating steps of gpt_1b3."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.model import registry
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import linear_kernels
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.parallel.stage import Stage
from gpt4d.step import TrainStep, build_stage
from gpt4d.validation import validate
from tests.gpu.check import Check
from tests.gpu.runs import best_run
from tests.gpu.timing import seconds_of
from tests.support.settings import configured

_ROUNDS = 5
_STEPS = {"cuda": 3, "cpu": 1}  # steps of each variant in a round
_WARM_UP = 2
_MAX_COST = 0.05  # maximum share of a step that a decision for precision costs
TODAY = "today"
_uses: Counter[str] = Counter()  # calls of each replaced function


@pytest.mark.gpu(number=10, part=3, limit_s=110, work_s=90)
def test_gradients_in_fp32_cost_little_of_a_step(check: Check) -> None:
    device, best = check.device, best_run(check)
    config, micro_batch = validate(configured([*best["overrides"], "optim.lr=1e-5"]), 1).config, best["micro_batch"]
    check.values["cache_layers"] = config.parallel.cache_layers
    stage = build_stage(config, Grid.single_device(), device)
    step = TrainStep(stage, whole_model(lambda module, batch: cast(Any, module).loss_sum(*batch)), config.optim)
    ids = torch.randint(cast(Any, config.model).vocab_size, (micro_batch, config.train.seq_len), device=device)
    batch = ids, ids.roll(-1, 1), torch.arange(micro_batch, device=device)
    recomputed = {0: registry.describe(config.model).layer_weights(recompute=True)}
    variants: dict[str, Callable[[], AbstractContextManager]] = {
        TODAY: nullcontext,
        "weight gradients in bf16": lambda: patch.object(linear_kernels, "product", _rounded_product),
        "norm gradients in bf16": lambda: patch.object(LayerNormSpec, "forward", _norm_with_rounded_gradients),
        "full activation checkpointing": lambda: _recompute(step, recomputed),
        "selective activation checkpointing": lambda: _changed(stage, recompute_inputs=True),
        "no compiled functions": lambda: patch.object(compile, "_enabled", False),
    }
    seconds = _alternate(variants, lambda: step([batch], 1, ids.numel(), 1e-5), device)
    figures = [f"{statistics.median(seconds[TODAY]) * 1e3:.0f} ms"]
    for name in list(variants)[1:]:
        changes = [variant / today - 1 for today, variant in zip(seconds[TODAY], seconds[name], strict=True)]
        change = statistics.median(changes)
        check.values[name] = {"change": change, "min": min(changes), "max": max(changes)}
        figures.append(f"{name} {change:+.1%} ({min(changes):+.1%} to {max(changes):+.1%})")
        if name.endswith("bf16"):
            check.require(_uses[name] > 0, f"{name}: the variant replaces nothing that a step calls")
            cost = 1 / (1 + change) - 1
            check.require(cost < _MAX_COST or check.rehearsal, f"{name}: gradients in fp32 cost {cost:.1%} of a step")
    check.values |= {"micro_batch": micro_batch, "seconds": seconds}
    check.figure = ", ".join(figures)


def _alternate(
    variants: dict[str, Callable[[], AbstractContextManager]], work: Callable[[], object], device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of ``work`` in each round, by variant: the machine's speed drifts for all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, _ROUNDS):
        for name, variant in variants.items():
            with variant():
                measured = seconds_of(work, device, _WARM_UP if number < 0 else _STEPS[device.type], warm_up=0)
            if number >= 0:
                seconds[name].append(measured)
    return seconds


def _rounded_product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None
) -> torch.Tensor:
    _uses["weight gradients in bf16"] += 1
    return (a @ b).to(dtype) if added_to is None else added_to.add_(a @ b)


def _norm_with_rounded_gradients(
    spec: LayerNormSpec, layer: Any, x: torch.Tensor, branch: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize as a LayerNorm does on a grid with y=1, with parameters, and thus their gradients, in x's dtype."""
    _uses["norm gradients in bf16"] += 1
    x = x if branch is None else x + branch
    return x, F.layer_norm(x, layer.weight.shape, layer.weight.to(x.dtype), layer.bias.to(x.dtype), spec.epsilon)


def _changed(stage: Stage, **settings: bool) -> AbstractContextManager:
    """Change settings of the stage's context."""
    return patch.object(stage.weights, "context", replace(stage.weights.context, **settings))


@contextmanager
def _recompute(step: TrainStep, layer_weights: Any) -> Iterator[None]:
    stage = step.stage
    with _changed(stage, recompute=True), patch.object(stage, "layer_weights", layer_weights):
        runtime = StageRuntime(stage, step.reducer, step.runtime.compute)  # a runtime plans the order of weights once
        with patch.object(step, "runtime", runtime):
            yield
