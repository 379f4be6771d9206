"""The workload of ``benchmarks.peers``, equal for all workers: a GPT-2, its initial weights, tokens and AdamW."""

from collections.abc import Callable

import torch

from benchmarks.interleave import ContenderStep
from gpt4d.config import Config, OptimConfig, ParallelConfig
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.step import build_stage

MODEL = GPT2Config("benchmark", layers=4, hidden=512, heads=8, vocab_size=512, max_positions=128)
BATCH = 8  # sequences per step, over all ranks
STEPS = 3  # consecutive steps per turn, so that work that a step defers to the next one is measured
OPTIM = OptimConfig()  # used with a constant learning rate and gradient clipping


def repeat_step(step: ContenderStep, finish: Callable[[], None] = lambda: None) -> ContenderStep:
    """Return a turn of ``STEPS`` steps; ``finish`` waits for what the last one left in flight."""

    def turn() -> Callable[[], dict]:
        for _ in range(STEPS):
            collect_results = step()
        finish()
        return lambda: _per_step(collect_results())

    return turn


def _per_step(answer: dict) -> dict:
    exposed = {axis: seconds / STEPS for axis, seconds in answer.get("exposed_s", {}).items()}
    return {**answer, "steps": STEPS} | ({"exposed_s": exposed} if exposed else {})


def our_stage(grid: Grid, model: GPT2Config = MODEL) -> Stage:
    """Return our model on ``grid``. As in the other workers, gathered weights stay until the backward."""
    config = Config(model=model, parallel=ParallelConfig(cache_layers="all"))
    return build_stage(config, grid, torch.device("cpu"))


def initial_weights(model: GPT2Config = MODEL) -> dict[str, torch.Tensor]:
    """Return the global tensors with which all workers start."""
    return {name: p.detach() for name, p in our_stage(Grid.single_device(), model).module.named_parameters()}


def sequences(share: int, shares: int, config: GPT2Config = MODEL, batch: int = BATCH) -> tuple[torch.Tensor, ...]:
    """Return token ids and targets [batch / shares, positions]: share number ``share`` of the batch.

    The tokens are random and the same in each step: the model memorizes them, and the loss falls fast enough to show
    that two workers compute the same.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.max_positions + 1), generator=generator)
    tokens = tokens[share * batch // shares : (share + 1) * batch // shares]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
