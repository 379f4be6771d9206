"""The shares of steps and seconds that the benchmark of optimizers states."""

import pytest

from benchmarks.experiments.optimizers import crossing, summary

ADAMW = [{"step": 10 * n, "seconds": 2.0 * n, "loss": 6.0 - n} for n in range(1, 4)]
MUON = [{"step": 10 * n, "seconds": 3.0 * n, "loss": 6.0 - 2 * n} for n in range(1, 4)]


def test_a_loss_between_two_validations_is_interpolated():
    assert crossing(MUON, 3.0) == {"step": 15, "seconds": 4.5}
    assert crossing(ADAMW, 1.0) is None


def test_shares_compare_with_the_end_of_adamws_run():
    found = summary({"adamw": [ADAMW], "muon": [MUON]})
    assert found["medians"] == {"steps": pytest.approx(0.5), "seconds": pytest.approx(0.75)}
