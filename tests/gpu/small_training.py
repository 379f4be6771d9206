"""Training of a small GPT-2 on grids, compared with one rank. Checks 5 and 9 run it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gpt4d.config import Config, GridSizes, OptimConfig, TrainConfig
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.step import TrainStep, build_stage
from tests.gpu.check import Check, largest_difference

_STEPS = 3
_BOUND = 1e-4  # relative difference to one rank
_LENGTH, _BATCH = 32, 8


@dataclass(frozen=True)
class GridCase:
    """A grid on which to train, with or without sharded optimizer states."""

    sizes: GridSizes
    shard_states: bool = False

    def __str__(self) -> str:
        return f"{self.sizes}{' with sharded states' if self.shard_states else ''}"


def compare(check: Check, answers: list[dict[str, list[float]]]) -> None:
    """Require losses and norms on all grids and ranks (``train_on_grids``) to agree with one rank's."""
    reference = answers[0].pop("one rank")
    check.values["one rank"] = reference
    for name in answers[0]:
        difference = max(largest_difference(answer[name], reference) for answer in answers)
        check.values[f"difference on {name}"] = difference
        check.require(difference < _BOUND, f"on {name} the relative difference is {difference:.1e}")
    largest = max(value for name, value in check.values.items() if name.startswith("difference"))
    check.figure = f"{', '.join(answers[0])} within {largest:.1e} of one rank"


def train_on_grids(cases: list[GridCase], device: torch.device) -> dict[str, list[float]]:
    """Return loss and norm of each step on this rank, by grid. Rank 0 also trains alone, as ``one rank``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    answers = {}
    if dist.get_rank() == 0:
        answers["one rank"] = train(GridCase(GridSizes()), Grid.single_device(), device)
    for case in cases:
        answers[str(case)] = train(case, Grid(case.sizes, device.type), device)
    return answers


def train(case: GridCase, grid: Grid, device: torch.device) -> list[float]:
    """Return loss and norm of each of a few steps with recomputation, dropout and documents, in fp32."""
    step, batch, tokens = build_step(case, grid, device)
    values: list[float] = []
    for _ in range(_STEPS):
        result = step([batch], 1, tokens, 1e-3)
        values += [result.loss.item(), result.norm.item()]
    step.reducer.wait_params()
    return values


def build_step(case: GridCase, grid: Grid, device: torch.device) -> tuple[TrainStep, tuple, int]:
    """Return the training step of a small GPT-2, this rank's part of a batch, and the number of tokens of the batch."""
    model = GPT2Config(
        "grids", layers=2, hidden=64, heads=4, vocab_size=500, max_positions=_LENGTH, dropout=0.1, attention_dropout=0.1
    )
    optim = replace(OptimConfig(), shard_states=case.shard_states)
    train_config = TrainConfig(seq_len=_LENGTH, batch_size=_BATCH, precision="fp32", activation_checkpointing="full")
    stage = build_stage(Config(model=model, train=train_config, optim=optim), grid, device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (_BATCH, _LENGTH + 1), generator=generator)
    batch = tokens[:, :-1], tokens[:, 1:], torch.arange(_BATCH)
    part = [tensor.chunk(grid.sizes.batch_shards)[grid.batch_shard].to(device) for tensor in batch]
    documents = Documents.ending_with(0, part[0] // 20)
    return TrainStep(stage, whole_model(_loss_sum), optim), (*part, documents), _BATCH * _LENGTH


def _loss_sum(module: Any, batch: tuple) -> torch.Tensor:
    return module.loss_sum(*batch)
