"""The contenders of the benchmark of experts compute the same outputs and gradients as a loop over all experts."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.adapters import gpt4d_moe, torch_moe
from benchmarks.experiments import moe
from benchmarks.gradient_steps import largest_difference
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.moe_steps import MoeConfig
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.layers import experts

CONFIG = MoeConfig(layers=2, hidden=16, inner=24, experts=8, tokens=32)
_DIFFERENCES = ("1x1x1x1", 0.0), ("1x1x2x1", 2e-5)


def expected():
    """Return the output and all gradients of a loop over the experts of one rank."""
    work = CONFIG.work
    weights = {name: weight.clone().requires_grad_() for name, weight in work.weights.items()}
    x = inputs = work.inputs.clone().requires_grad_()
    for layer in range(CONFIG.layers):
        router, up, down = (weights[f"{layer}.{name}"] for name in ("router", "up", "down"))
        routes = work.routes[:, layer]
        shares = torch.zeros(len(x), 8).scatter(1, routes, (x @ router).gather(1, routes).softmax(-1))
        out = x
        for expert in range(8):
            act = F.silu(x @ up[expert, :, 0]) * (x @ up[expert, :, 1])
            out = out + shares[:, expert, None] * (act @ down[expert])
        x = out
    x.backward(work.upstream)
    return {"output": x.detach(), "input": inputs.grad, **{name: weight.grad for name, weight in weights.items()}}


def computed(name: str):
    """Return the results of two steps of a contender on a rank, which must not depend on earlier steps."""
    plain = name == "torch"
    step = torch_moe.Mixtures(CONFIG.work, dist.new_group()) if plain else gpt4d_moe.Mixtures(name, CONFIG.work)
    step.forward_backward()
    step.collect_results()
    step.forward_backward()
    return step.gradients()


@pytest.mark.parametrize(
    "name", ["torch", "1x1x4x1/chunks=2", "2x1x2x1", "2x1x2x1/tokens/chunks=2", "1x2x2x1/chunks=2", "1x1x2x2"]
)
def test_contenders_equal_a_loop_over_all_experts(ranks, name):
    found, *_ = ranks.run(4, computed, name)
    assert largest_difference(found, expected()) < 1e-5


def order_of_backward():
    """Return the order in which a backward starts all-to-alls and computes gradients of weights."""
    events: list[str] = []
    step = gpt4d_moe.Mixtures("1x1x2x1", CONFIG.work)
    start, gradient = Axis.start_all_to_all, experts.grouped_weight_gradient

    def started(axis, sent, *rows):
        if sent.shape[1:] == (CONFIG.hidden,):
            events.append("rows")
        return start(axis, sent, *rows)

    def computed_gradient(*arguments):
        events.append("weight")
        return gradient(*arguments)

    with (
        patch.object(Axis, "start_all_to_all", started),
        patch.object(experts, "grouped_weight_gradient", computed_gradient),
    ):
        step.forward_backward()
    return events[2 * CONFIG.layers :]  # without the all-to-alls of the forward


def test_rows_return_while_weight_gradients_are_computed(ranks):
    for events in ranks.run(2, order_of_backward):
        assert events == ["rows", "rows", "weight", "weight"] * CONFIG.layers


def test_a_virtual_device_has_the_same_experts_of_tokens():
    expected = moe.Settings(layers=1).work.routes
    with VirtualDevice(2e10, 1000.0, 20.0):
        routes = moe.Settings(layers=1).work.routes
        parts = [routes[first : first + 256].flatten() for first in range(0, 2048, 256)]
    assert torch.equal(torch.cat(parts), expected.flatten())
    counts = expected.flatten().bincount()
    assert len(counts) == 8 and counts.max() < 1.1 * counts.float().mean()
    assert (expected[..., 0] != expected[..., 1]).all()


def test_a_loss_of_equality_is_an_error():
    rows = [{"family": "ours", "name": name, "peak_mib": 1.0, "gradient_difference": d} for name, d in _DIFFERENCES]
    with patch.object(moe, "compared_gradients", lambda *_: rows), pytest.raises(RuntimeError, match="1x1x2x1: output"):
        moe.values(moe.Settings())


@pytest.mark.slow
def test_workers_compare_stored_gradients(capsys):
    settings = moe.Settings(hosts=1, ranks=2, layers=1, hidden=16, inner=24, tokens=16, grids="1x1x2x1/chunks=2")
    rows = moe.values(settings)
    assert [row["name"] for row in rows][:2] == ["1x1x2x1/chunks=2", "expert parallel"]
    assert all(row["peak_mib"] > 0 for row in rows)
    assert "expert parallel" in capsys.readouterr().out


def test_the_plot_has_a_panel_for_each_number_of_hosts():
    row = {"family": "ours", "name": "1x1x8x1", "median_s": 2.0, "min_s": 1.9, "max_s": 2.1, "exposed_s": {"z": 0.5}}
    results = {"layers": 4, "hosts_2": [row], "hosts_1": [row, {"family": "torch", "name": "x", "not_counted": 5}]}
    assert len(moe.plot(moe.Settings(), results).axes) == 2
    assert moe.plot(moe.Settings(), {"layers": 4}) is None
