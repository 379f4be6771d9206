"""The benchmark of Muon: both schemes compute the same updates, and its figures follow from the medians."""

import pytest
import torch

from benchmarks.adapters.gpt4d_muon import UpdateTraining
from benchmarks.experiments.muon import update
from benchmarks.workloads import Workload
from gpt4d.model.gpt2.config import GPT2Config

WORK = Workload(GPT2Config("small", 2, 32, 4, vocab_size=64, max_positions=16), batch=8, steps=1)


def trained(grid, variant):
    """Return, on a rank, its weights after three steps, and the axes on which the update waited."""
    training = UpdateTraining(grid, variant, WORK)
    for _ in range(3):
        results = training.step()()
    weights = {name: p.detach().clone() for name, p in training.stage.module.named_parameters()}
    return weights, {axis for axis, seconds in results["update_exposed_s"].items() if seconds}


@pytest.mark.parametrize("grid", ["2x1x2x1", "1x2x1x2", "2x1x1x2/sharded"])
def test_the_duplicated_scheme_computes_the_updates_of_muon(ranks, grid):
    results = zip(*(ranks.run(4, trained, grid, variant) for variant in ("muon", "duplicated", "adamw")), strict=True)
    for (muon, waited), (duplicated, gathered), (adamw, _) in results:
        assert "stage" in waited and "x" in gathered and "stage" not in gathered
        for name, weight in muon.items():
            torch.testing.assert_close(duplicated[name], weight, rtol=1e-5, atol=1e-6)
        assert any((adamw[name] - weight).abs().max() > 1e-3 for name, weight in muon.items())


def test_an_update_takes_the_time_that_adamws_step_does_not_take():
    rows = [
        {"name": f"{grid} {variant}", "median_s": scale * seconds, "update_exposed_s": {"stage": 0.5, "data": 0.1}}
        for grid, scale in (("1x1x8x1", 7.0), ("4x1x2x1", 1.0))
        for variant, seconds in (("adamw", 8.0), ("muon", 12.0), ("duplicated", 40.0))
    ]
    figures = {"muon_s": 4.0, "duplicated_s": 32.0, "ratio": 0.125, "muon_share": 4 / 12, "duplicated_share": 0.8}
    assert update("4x1x2x1", rows) == pytest.approx(figures | {"exposed_share": 0.05})
