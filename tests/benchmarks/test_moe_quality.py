"""The models whose losses after equal time the benchmark of a mixture's quality compares."""

from dataclasses import replace

import pytest

from benchmarks.experiments.moe_quality import MODELS, sizes, summary
from benchmarks.training import train_together, validations
from gpt4d.model.moe.model import active_llama
from tests.support.settings import configured


def test_the_dense_model_is_the_llama_of_the_experts_that_a_token_uses():
    mixture, dense = (configured(MODELS[name]) for name in ("mixture", "dense"))
    assert replace(active_llama(mixture.model), name=dense.model.name) == dense.model
    assert (dense.train, dense.data, dense.optim) == (mixture.train, mixture.data, mixture.optim)


def test_active_parameters_differ_by_the_routers_alone():
    mixture, dense = sizes("mixture"), sizes("dense")
    assert dense["parameters"] == dense["active_parameters"]
    layers, hidden, experts = 2, 128, 8
    assert mixture["active_parameters"] - dense["active_parameters"] == layers * hidden * experts


def test_seconds_of_a_validation_are_the_seconds_of_the_steps_before_it():
    lines = [
        {"event": "start", "step": 0},
        {"step": 1, "step_time_s": 0.5, "loss": 9.0},
        {"step": 2, "step_time_s": 0.25, "loss": 8.0},
        {"event": "validation", "step": 2, "loss": 8.5, "bits_per_byte": 3.0},
        {"step": 3, "step_time_s": 1.0, "loss": 7.0},
        {"event": "validation", "step": 3, "loss": 7.5},
    ]
    assert validations(lines) == [
        {"step": 2, "seconds": 0.75, "loss": 8.5, "bits_per_byte": 3.0},
        {"step": 3, "seconds": 1.75, "loss": 7.5},
    ]


@pytest.mark.slow
def test_a_model_that_does_not_train_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"train.py failed: first, second$"):
        train_together({tmp_path / name: ["train.steps=-1"] for name in ("first", "second")})


def test_the_summary_has_the_medians_of_the_last_validations():
    finals = {"mixture": (3.0, 5.0, 4.0), "dense": (6.0, 8.0, 9.0)}
    runs = {
        name: [{"processor_s": 2 * loss, "curve": [{"loss": 10.0}, {"loss": loss}]} for loss in losses]
        for name, losses in finals.items()
    }
    found = summary(runs)
    assert found["mixture"] == {"losses": [3.0, 5.0, 4.0], "medians": {"loss": 4.0, "processor_s": pytest.approx(8.0)}}
    assert found["dense"]["medians"]["loss"] == 8.0
