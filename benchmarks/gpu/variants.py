"""Check 10: what some decisions cost, by undoing them one at a time in alternating steps of gpt_1b3."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu.check import CheckContext, Outcome
from benchmarks.gpu.speed import GPT_1B3, best_run
from benchmarks.gpu.timing import device_of, seconds_of
from gpt4d.config import compose
from gpt4d.model import registry
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import linear_kernels
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.stage import Stage
from gpt4d.step import TrainStep, build_stage

_ROUNDS = 5
_STEPS = {"cuda": 3, "cpu": 1}  # of each variant in a round
_WARM_UP = 2
_MOST = 0.05  # of a step, that a decision for precision may cost
TODAY = "today"
_uses: Counter[str] = Counter()  # calls of what a variant replaces


def check(context: CheckContext) -> Outcome:
    device, micro_batch, outcome = device_of(context.device_type), best_run(context)["micro_batch"], Outcome()
    model = GPT_1B3.overrides(context.rehearsal)
    config = compose([*model, f"train.batch_size={micro_batch}", "train.precision=bf16", "optim.lr=1e-5"])
    stage = build_stage(config, Grid.single_device(), device)
    step = TrainStep(stage, whole_model(lambda module, batch: cast(Any, module).loss_sum(*batch)), config.optim)
    ids = torch.randint(cast(Any, config.model).vocab_size, (micro_batch, config.train.seq_len), device=device)
    batch = ids, ids.roll(-1, 1), torch.arange(micro_batch, device=device)
    recomputed = {0: registry.describe(config.model).layer_weights(recompute=True)}
    variants: dict[str, Callable[[], AbstractContextManager]] = {
        TODAY: nullcontext,
        "weight gradients in bf16": lambda: patch.object(linear_kernels, "product", _rounded_product),
        "norm gradients in bf16": lambda: patch.object(LayerNormSpec, "forward", _norm_with_rounded_gradients),
        "full activation checkpointing": lambda: _recompute(stage, recomputed),
        "selective activation checkpointing": lambda: patch.object(stage.weights, "recompute_inputs", True),
        "no compiled functions": lambda: _without_compiled_functions(device),
    }
    seconds = _alternate(variants, lambda: step([batch], 1, ids.numel(), 1e-5), device)
    figures = [f"{statistics.median(seconds[TODAY]) * 1e3:.0f} ms"]
    for name in list(variants)[1:]:
        changes = [variant / today - 1 for today, variant in zip(seconds[TODAY], seconds[name], strict=True)]
        change = statistics.median(changes)
        outcome.values[name] = {"change": change, "least": min(changes), "most": max(changes)}
        figures.append(f"{name} {change:+.1%} ({min(changes):+.1%} to {max(changes):+.1%})")
        if name.endswith("bf16"):
            outcome.require(_uses[name] > 0, f"{name}: the variant replaces nothing that a step calls")
            cost = 1 / (1 + change) - 1
            outcome.require(cost < _MOST or context.rehearsal, f"{name}: gradients in fp32 cost {cost:.1%} of a step")
    outcome.values |= {"micro_batch": micro_batch, "seconds": seconds}
    outcome.figure = ", ".join(figures)
    return outcome


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


@contextmanager
def _without_compiled_functions(device: torch.device) -> Iterator[None]:
    compile.enable(False, device)
    try:
        yield
    finally:
        compile.enable(None, device)


@contextmanager
def _recompute(stage: Stage, layer_weights: Any) -> Iterator[None]:
    with patch.object(stage.weights, "recompute", True), patch.object(stage, "layer_weights", layer_weights):
        yield
