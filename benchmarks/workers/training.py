"""The work of the peers' benchmark, the same for every team: a GPT-2, its first weights, its tokens, its AdamW."""

from collections.abc import Callable

import torch

from benchmarks.interleave import Step
from gpt4d.config import ModelConfig, OptimConfig
from gpt4d.model.gpt import GPT
from gpt4d.model.init import initialize
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream

MODEL = ModelConfig("benchmark", layers=4, hidden=512, heads=8, vocab_size=512, max_positions=128)
BATCH = 8  # sequences of a step, over all ranks
STEPS = 3  # of a turn, one after another: what a step leaves for the next one to do is done within the turn
OPTIM = OptimConfig()  # with the rate as it stands, step after step, and gradients clipped


def in_a_row(step: Step, settle: Callable[[], None] = lambda: None) -> Step:
    """A turn of ``STEPS`` steps; ``settle`` ends what the last one left under way."""

    def turn() -> Callable[[], dict]:
        for _ in range(STEPS):
            told = step()
        settle()
        return lambda: _of_one_step(told())

    return turn


def _of_one_step(answer: dict) -> dict:
    exposed = {axis: seconds / STEPS for axis, seconds in answer.get("exposed_s", {}).items()}
    return {**answer, "steps": STEPS} | ({"exposed_s": exposed} if exposed else {})


def our_model(weights: WeightStream, config: ModelConfig = MODEL, cache_layers: int = 0) -> GPT:
    model = GPT(config, weights, cache_layers=cache_layers)
    initialize(model, 0, weights.grid)
    return model


def whole_weights(config: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    """The global tensors that everyone starts from. To be called before there is a process group."""
    return {name: p.detach() for name, p in our_model(WeightStream(Grid()), config).named_parameters()}


def sequences(share: int, shares: int, config: ModelConfig = MODEL, batch: int = BATCH) -> tuple[torch.Tensor, ...]:
    """Token ids and targets [batch / shares, positions]: one of the equal shares of the batch.

    Random tokens, and the same ones in each step: they are learnt by heart, and the loss falls fast enough to show
    that two teams do the same.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.max_positions + 1), generator=generator)
    mine = tokens[share * batch // shares : (share + 1) * batch // shares]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
