"""The toy family in plain torch, and configurations of its runs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpt4d.config import Config
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from tests.seams import toy_torch
from tests.seams.toy import WeightedFunction, joined, of_rows  # registers the family
from tests.support.settings import configured
from tests.support.stages import check_step, step_of_task

RECOMPUTED = ("train.activation_checkpointing=full", "train.micro_batch_size=2", "parallel.cache_layers=1")


def configure(*overrides: str) -> Config:
    return configured(["model=toy", "optim=adamw", "train.seq_len=3", "train.batch_size=16", *overrides])


class PlainToy:
    """The toy model in plain torch, with the initial weights of a run of ``config``."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.float64):
        module = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu"), dtype).module
        self.config = config
        self.weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ weight for weight in self.weights[f"blocks.{index}.up.weight"].unbind(1))
        return x + (F.silu(gate) * up) @ self.weights[f"blocks.{index}.down.weight"]

    def __call__(self, x_BSF: torch.Tensor) -> torch.Tensor:
        x_TF, tensors = x_BSF.flatten(0, 1), {}
        x_TH = x_TF @ self.weights["input.weight"]
        if self.config.model.skips:
            tensors = dict(zip(("embedded", "classes", "mask"), (x_TH, *of_rows(x_TF)), strict=True))
        for index in range(self.config.model.blocks):
            x_TH = self.block(index, joined(index, x_TH, tensors) if tensors else x_TH)
            if tensors and index == 1:
                tensors["halves"] = WeightedFunction.in_torch(x_TH, tensors["classes"])
        return (x_TH @ self.weights["output.weight"]).unflatten(0, x_BSF.shape[:2])

    def squared_error(self, sample_ids: Sequence[int]) -> torch.Tensor:
        inputs, targets = toy_torch.samples(self.config, sample_ids)
        difference = self(inputs.to(self.weights["input.weight"].dtype)) - targets
        return difference.square().sum() / (len(sample_ids) * self.config.train.seq_len)


def check_against(ranks, model: PlainToy, world_size: int) -> None:
    """Compare an evaluation and a step of the model's configuration on ranks with plain torch, in float64."""
    loss = model.squared_error(range(model.config.train.batch_size))
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.weights.items()}
    check_step(ranks.run(world_size, step_of_task, model.config, world_size), [loss.item()] * 2, gradients)
