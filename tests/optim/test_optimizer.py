import pytest
import torch

from gpt4d.config import GridSizes, OptimConfig
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.layout import Layout, ParameterSpec
from tests.support.grids import TINY_MODEL, build_model


def test_only_matrices_decay_not_biases_or_norms():
    model = build_model(TINY_MODEL, GridSizes(), torch.float32)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1))
    names = {p: n for n, p in model.named_parameters()}
    *decayed, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    decaying = [name for group in decayed for name in group]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert all(name.endswith(".weight") and "norm" not in name for name in decaying)
    assert all(name.endswith(".bias") or "norm" in name for name in others)
    assert len(decaying) == 2 + 4 * TINY_MODEL.layers


def updated(limit, update):
    """Parameters after two steps of ``update``, which is given the optimizer, the gradients' norm and the limit."""
    parameters = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    for parameter in parameters:
        parameter.spec = ParameterSpec(tuple(parameter.shape), Layout(*[()] * parameter.dim()))
    optimizer = Optimizer(zip("ab", parameters, strict=True), OptimConfig(lr=0.1))
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
        optimizer.step(torch.tensor(False), norm, limit)

    def theirs(optimizer, parameters, norm, limit):
        if limit:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.adamw.step()

    torch.testing.assert_close(updated(limit, ours), updated(limit, theirs), rtol=1e-6, atol=0)
