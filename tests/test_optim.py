import math

import pytest
import torch

from gpt4d import optim
from gpt4d.config import GridSizes, OptimConfig
from gpt4d.parallel.layout import Layout, ParameterSpec
from tests.grids import TINY_MODEL, build_model


def test_the_rate_warms_up_linearly_then_follows_a_cosine_to_its_share_of_lr():
    config = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [optim.learning_rate(step, config, 110) for step in range(120)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert rates[110:] == pytest.approx([0.1] * 10)


def test_schedule_steps_sets_the_end_of_the_cosine_independent_of_the_run():
    config = OptimConfig(warmup_steps=0, schedule_steps=50)
    assert optim.learning_rate(25, config, 10) == optim.learning_rate(25, config, 1000)


def test_only_matrices_decay_not_biases_or_norms():
    model = build_model(TINY_MODEL, GridSizes(), torch.float32)
    optimizer = optim.build_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1))
    names = {p: n for n, p in model.named_parameters()}
    decaying, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(name.endswith(".weight") and "norm" not in name for name in decaying)
    assert all(name.endswith(".bias") or "norm" in name for name in others)
    assert len(decaying) == 2 + 4 * TINY_MODEL.layers


def updated(limit, update):
    """Parameters after two steps of ``update``, which is given the optimizer, the gradients' norm and the limit."""
    parameters = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    for parameter in parameters:
        parameter.spec = ParameterSpec(tuple(parameter.shape), Layout(*[()] * parameter.dim()), decay=False)
    optimizer = optim.build_optimizer(zip("ab", parameters, strict=True), OptimConfig(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).double()
        update(optimizer, parameters, norm, limit)
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("limit", [0.5, 100.0, 0.0])
def test_an_update_equals_torchs_clipping_and_step(limit):
    def ours(optimizer, parameters, norm, limit):
        optim.update(optimizer, torch.tensor(False), norm, limit)

    def theirs(optimizer, parameters, norm, limit):
        if limit:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()

    torch.testing.assert_close(updated(limit, ours), updated(limit, theirs), rtol=1e-6, atol=0)
