"""The trainers of the benchmark on one device do the same work."""

import pytest

from benchmarks.experiments.one_device import TrainerSettings, compare, parse_cases, trainings
from gpt4d.config import ConfigError


def losses(trainer):
    config = TrainerSettings(layers=2, hidden=32, heads=2, vocabulary=128, length=8, batch=2, trainer=trainer)
    training = trainings(config)["eager"]
    return [training.step()()["loss"] for _ in range(3)]


def test_all_trainers_have_the_same_losses(ranks):
    (ours,) = ranks.run(1, losses, "ours")
    assert ours[2] < ours[0]
    for trainer in ("torch", "transformers"):
        assert ranks.run(1, losses, trainer)[0] == pytest.approx(ours, rel=1e-5)


def test_ours_is_compared_with_the_best_of_the_others():
    rows = [
        {"family": "ours", "name": "eager", "tokens_per_s": 120.0, "peak_mib": 30.0},
        {"family": "torch", "name": "eager", "tokens_per_s": 80.0, "peak_mib": 60.0},
        {"family": "transformers", "name": "compiled", "tokens_per_s": 100.0, "peak_mib": 50.0},
    ]
    expected = {"tokens_per_s_over_best": 1.2, "peak_over_torch_nn": 0.5}
    assert compare(rows, "tokens_per_s") == pytest.approx(expected)
    assert compare(rows[:1], "tokens_per_s") == {}


@pytest.mark.parametrize("text", ["8192", "8192:fp16", "0:fp32", "all"])
def test_other_cases_are_rejected(text):
    with pytest.raises(ConfigError, match=f"cases={text}: not a list of vocabulary:precision"):
        parse_cases(text)
