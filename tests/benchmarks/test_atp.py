"""Comparisons of meshes leave out meshes without a run that counts."""

import pytest

from benchmarks.experiments.atp import compare, gains_of_chunks

PREDICTED = {"8x1": 10.0, "4x2": 8.0, "2x4": 9.0}


def test_the_planners_mesh_and_its_gain_over_the_first():
    comparison = compare(list(PREDICTED), "8x1", {"8x1": 12.0, "4x2": 10.0, "2x4": 8.0}, PREDICTED)
    assert (comparison["best"], comparison["chosen"], comparison["chosen_over_best"]) == ("2x4", "4x2", 1.25)
    assert comparison["gain"] == pytest.approx(0.5) and comparison["predicted_gain"] == pytest.approx(10 / 9 - 1)


def test_a_mesh_without_a_run_that_counts_is_left_out():
    comparison = compare(list(PREDICTED), "8x1", {"4x2": 10.0}, PREDICTED)
    assert comparison == {"best": "4x2", "chosen": "4x2", "chosen_over_best": 1.0}
    assert compare(list(PREDICTED), "8x1", {}, PREDICTED) == {}


def test_gains_of_chunks_are_over_the_best_mesh_and_over_no_overlap():
    seconds = {"4x2": 10.0, "4x2/chunks=4": 8.0, "4x2/waiting-sums": 12.0}
    best = {1: {"best": "4x2"}, 4: {"best": "4x2/chunks=4"}}
    assert gains_of_chunks("4x2/waiting-sums", best, seconds) == pytest.approx(
        {"gain": 0.25, "gain_over_waiting_sums": 0.5}
    )
    assert gains_of_chunks("4x2/waiting-sums", {1: {}, 4: best[4]}, seconds) == {}
