"""Training in tests: trainers that are watched, and plain torch, which complete runs are compared with."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpt4d.config import Config
from gpt4d.data import sampler
from gpt4d.data.corpus import corpus as prepared
from gpt4d.optim.schedule import learning_rate
from gpt4d.step import TrainStep
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.support.grids import metric_lines


def losses_and_norms(run: Config | str | Path | list[dict]) -> tuple[list[float], list[float]]:
    """Return the losses and the gradient norms of a run, of its directory or of its logged steps."""
    lines = run if isinstance(run, list) else metric_lines(run.run.dir if isinstance(run, Config) else run)
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


@contextmanager
def before_each_step(trainer: Trainer, action: Callable[[int], object]) -> Iterator[None]:
    """Call ``action`` with the number of each step that the trainer begins."""
    original = TrainStep.__call__

    def step(self, *arguments, **settings):
        action(trainer.progress.step + 1)
        return original(self, *arguments, **settings)

    with patch.object(TrainStep, "__call__", step):
        yield


def build_trainer(config: Config) -> Trainer:
    """Return a trainer on the CPU, on each rank of the process group."""
    return Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))


def mean_loss(config: Config, sizes: Sequence[int] = ()):
    """Return the function from a model and a step to the mean loss of the tokens of the step's batch.

    ``sizes`` are the batch sizes of the steps, by default ``train.batch_size``.
    """
    tokens = prepared(config.data).first.tokens("train")
    data = sampler.Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)
    sizes = sizes or [config.train.batch_size] * config.train.steps
    ends = list(itertools.accumulate(sizes))

    def loss_of(model, step):
        rows = torch.from_numpy(data.rows(np.arange(ends[step] - sizes[step], ends[step]))).long()
        return F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())

    return loss_of


def plain_torch_run(config: Config, model: torch.nn.Module, loss_of=None, rate_factor=lambda name: 1.0):
    """Train a model of transformers with torch's optimizer, our schedule and clipping. Return the losses and norms.

    ``loss_of`` returns the loss of the model in a step, by default the mean over the tokens of the configured data.
    ``rate_factor`` returns the factor of the learning rate of a parameter, which divides its weight decay.
    """
    groups = [
        {
            "params": [p],
            "weight_decay": config.optim.weight_decay / rate_factor(name) if p.dim() > 1 else 0.0,
            "factor": rate_factor(name),
        }
        for name, p in model.named_parameters()
    ]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=betas, eps=config.optim.epsilon)
    loss_of = loss_of or mean_loss(config)
    losses, norms = [], []
    for step in range(config.train.steps):
        loss = loss_of(model, step)
        loss.backward()
        # In float64, because clip_grad_norm_ sums the squares of a large float32 tensor with an error of 2e-4.
        norm = torch.stack([p.grad.norm(dtype=torch.float64) for p in model.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.optim.clip_norm, norm.float())
        norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optim, config.train.steps) * group["factor"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def serial_fixture(overrides: Sequence[str], train: Callable[[Config], None], read: Callable[[Config], object]):
    """Return a fixture whose value is what ``read`` returns for a run on one device, which trains once."""
    made: list[object] = []

    @pytest.fixture
    def serial(ranks, tiny, tmp_path):
        if not made:
            config = tiny(*overrides, f"run.dir={tmp_path}/serial")
            ranks.run(1, train, config)
            made.append(read(config))
        return made[0]

    return serial
