import subprocess
import sys

import pytest
import torch

from gpt4d.config import GridSizes, OptimConfig
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.layout import Layout, ParameterSpec
from tests.support.grids import TINY_MODEL, build_model


def test_only_matrices_decay_not_biases_or_norms():
    model = build_model(TINY_MODEL, GridSizes(), torch.float32)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1))
    *decayed, others = (group.parameters for group in optimizer.groups)
    decaying = [name for parameters in decayed for name in parameters]
    assert [group.weight_decay for group in optimizer.groups] == [0.1, 0.1, 0.0]
    assert all(name.endswith(".weight") and "norm" not in name for name in decaying)
    assert all(name.endswith(".bias") or "norm" in name for name in others)
    assert len(decaying) == 2 + 4 * TINY_MODEL.layers


def updated(start):
    """Parameters after two steps. ``start`` returns a step from the parameters by name; a step gets the norm."""
    named = {"a": torch.nn.Parameter(torch.ones(4, 3)), "b": torch.nn.Parameter(torch.ones(5))}
    for parameter in named.values():
        parameter.spec = ParameterSpec(tuple(parameter.shape), Layout(*[()] * parameter.dim()), group="matrices")
    step, generator = start(named), torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        step(torch.nn.utils.get_total_norm([p.grad for p in named.values()]).double())
    return torch.cat([p.detach().flatten() for p in named.values()])


@pytest.mark.parametrize("limit", [0.5, 100.0, 0.0])
def test_an_update_equals_torchs_clipping_and_step(limit):
    config = OptimConfig(lr=0.1)

    def ours(named):
        optimizer = Optimizer(named.items(), config)
        return lambda norm: optimizer.step(torch.tensor(False), norm, limit)

    def theirs(named):
        betas = config.beta1, config.beta2
        optimizer = torch.optim.AdamW(named.values(), config.lr, betas, config.epsilon, config.weight_decay)

        def step(norm):
            if limit:
                torch.nn.utils.clip_grad_norm_(named.values(), limit)
            optimizer.step()

        return step

    torch.testing.assert_close(updated(ours), updated(theirs), rtol=1e-6, atol=0)


@pytest.mark.full
def test_an_optimizer_does_not_import_torchs_compiler():
    script = """
import sys, torch
from gpt4d.config import GridSizes, OptimConfig
from gpt4d.optim.optimizer import Optimizer
from tests.support.grids import TINY_MODEL, build_model
model = build_model(TINY_MODEL, GridSizes(), torch.float32)
optimizer = Optimizer(model.named_parameters(), OptimConfig())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step(torch.tensor(False), torch.tensor(1.0), limit=1.0)
optimizer.zero_grad()
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
