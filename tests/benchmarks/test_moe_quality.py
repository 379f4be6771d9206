"""The models whose losses after equal time the benchmark of a mixture's quality compares."""

from dataclasses import replace

import pytest

from benchmarks.experiments.moe_quality import MODELS, sizes
from benchmarks.training import train_together
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


@pytest.mark.slow
def test_a_model_that_does_not_train_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"train.py failed: first, second$"):
        train_together({tmp_path / name: ["train.steps=-1"] for name in ("first", "second")})
