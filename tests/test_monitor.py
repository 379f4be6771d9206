"""Non-finite steps change nothing, spikes are reported, and stragglers are named."""

import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import ConfigError, TrainConfig
from gpt4d.optim.monitor import LossMonitor, RunningStats, StepMetrics, all_finite
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.training.measuring import StragglerDetector
from tests.support.grids import global_tensor, metric_lines
from tests.support.rank_pool import RankFailure
from tests.support.run_files import events
from tests.support.training import build_trainer

NAN = math.nan


def step_metrics(step, loss, norm=1.0, skipped=False):
    return StepMetrics(step, loss, norm, 1e-3, skipped, stopping=False, routing=torch.zeros(0, 2))


def test_running_stats_learn_the_level_and_a_spike_does_not_hide_the_next():
    stats = RunningStats()
    for step in range(200):
        assert 3 + math.sin(step) <= stats.limit
        stats.add(3 + math.sin(step))
    assert 4.5 < stats.limit < 9
    limit = stats.limit
    stats.add(1e6)
    assert stats.limit < 2 * limit


def test_spikes_are_reported_with_the_limit_they_exceed():
    monitor = LossMonitor(TrainConfig(), 1e-3)
    for step in range(50):
        assert monitor.note(step_metrics(step, 3.0 + step % 2 / 10)) is None
    message, values = monitor.note(step_metrics(50, 9.0))
    assert "step 50: loss 9.0000" in message and "loss above 3." in message and "skipped" not in message
    assert values["bounds"].keys() == {"loss"} and values["skipped"] is False


def test_max_skipped_consecutive_steps_end_the_run():
    monitor = LossMonitor(TrainConfig(max_skipped=3), 1e-3)
    for step in range(1, 6):  # Never three in a row.
        monitor.note(step_metrics(step, NAN, NAN, skipped=True))
        monitor.note(step_metrics(step, NAN, NAN, skipped=True))
        assert not monitor.is_finite
        monitor.note(step_metrics(step, 3.0))
        assert monitor.is_finite
    expected = r"3 step\(s\) in a row were skipped; at step 9 loss and gradient norm are nan"
    with pytest.raises(ConfigError, match=expected):
        for step in range(7, 10):
            monitor.note(step_metrics(step, NAN, NAN, skipped=True))


def test_running_stats_continue_after_a_resume():
    straight, resumed = LossMonitor(TrainConfig(), 1e-3), LossMonitor(TrainConfig(), 1e-3)
    for step in range(60):
        straight.note(step_metrics(step, 3 + math.sin(step)))
        if step == 29:
            resumed.restore(json.loads(json.dumps(straight.state())))
        elif step > 29:
            resumed.note(step_metrics(step, 3 + math.sin(step)))
    assert resumed.stats == straight.stats


def test_all_finite_detects_any_non_finite_element():
    tensors = [torch.ones(3, 4), torch.zeros(()), torch.ones(5, dtype=torch.bfloat16)]
    assert all_finite(tensors)
    for bad in (math.nan, math.inf, -math.inf):
        for tensor in tensors:
            one = tensor.clone().view(-1)
            one[-1] = bad
            assert not all_finite([*tensors, one])


def test_a_rank_that_is_late_five_times_in_a_row_is_named():
    stragglers = StragglerDetector(["a", "a", "b", "b"])
    spread, message = stragglers.note([1.0, 1.0, 1.0, 1.1])
    assert spread == {"min": 1.0, "median": 1.0, "max": 1.1, "slowest": 3} and not message
    messages = [stragglers.note([1.0, 1.0, 2.0, 1.0])[1] for _ in range(5)]
    assert messages[:4] == [""] * 4 and messages[4] == "rank 2 on b takes 2.000 s per step, the median is 1.000 s"
    assert not stragglers.note([2.0, 1.0, 1.0, 1.0])[1]


def train_with_bad_gradient(config, steps, value, bad_rank=1):
    """Train on this rank; in ``steps``, set one gradient element on ``bad_rank`` to ``value``.

    Returns the global weights before the update of each step, in one vector.
    """
    trainer = build_trainer(config)
    finish, weights = GradientReducer.finish, []

    def finish_with_bad_value(self):
        if trainer.progress.step + 1 in steps and dist.get_rank() == bad_rank:
            next(p for p in trainer.stage.module.parameters() if p.grad is not None).grad.view(-1)[0] = value
        finish(self)
        parameters = trainer.stage.module.parameters()
        weights.append(torch.cat([global_tensor(each, each.spec, trainer.stage.grid).view(-1) for each in parameters]))

    with patch.object(GradientReducer, "finish", finish_with_bad_value):
        trainer.run()
    return weights


def test_a_nan_on_one_rank_skips_the_step_on_all_and_is_counted(ranks, tiny):
    config = tiny("parallel.gz=2", "train.steps=6", "parallel.overlap.data=false", "checkpoint.every=1")
    weights = ranks.run(2, train_with_bad_gradient, config, (3, 4), NAN)
    before = weights[0]
    assert torch.equal(before[3], before[2]) and torch.equal(before[4], before[2])  # two updates changed nothing
    assert not torch.equal(before[5], before[4])
    assert all(torch.equal(torch.stack(other), torch.stack(before)) for other in weights[1:])
    lines = metric_lines(config.run.dir)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 2, 2, 2]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, True, False, False]
    assert [line["step"] for line in events(config.run.dir, "skipped")] == [3, 4]
    # No checkpoint is saved after a non-finite step.
    assert [line["step"] for line in events(config.run.dir, "checkpoint")] == [1, 2, 5, 6]


def test_a_run_resumed_after_skipped_steps_gives_the_same_bits(ranks, tiny, tmp_path):
    common = "parallel.overlap.data=false", "optim.schedule_steps=9", "train.deterministic=true"
    straight = tiny(*common, "train.steps=9", f"run.dir={tmp_path / 'straight'}")
    expected = ranks.run(1, train_with_bad_gradient, straight, (1, 4), NAN, 0)[0]
    weights = []
    for steps in (5, 9):
        config = tiny(*common, f"train.steps={steps}")
        weights += ranks.run(1, train_with_bad_gradient, config, (1, 4), NAN, 0)[0]
    assert [line["skipped"] for line in metric_lines(config.run.dir)] == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert torch.equal(torch.stack(weights), torch.stack(expected))
    assert not torch.equal(weights[8], weights[4])


def test_persistent_non_finite_steps_end_the_run(ranks, tiny):
    config = tiny("train.steps=9", "train.max_skipped=3", "checkpoint.every=1", "parallel.overlap.data=false")
    with pytest.raises(RankFailure, match=r"3 step\(s\) in a row were skipped; at step 5") as raised:
        ranks.run(2, train_with_bad_gradient, config, range(3, 10), math.inf)
    assert str(raised.value).count("in a row were skipped; at step 5") == 2


def test_skipped_spikes_leave_the_weights_unchanged(ranks, tiny):
    settings = "train.steps=30", "train.skip_spikes=true", "optim.lr=1e-4", "optim.min_lr_ratio=0"
    config = tiny(*settings, "parallel.overlap.data=false")
    weights = ranks.run(1, train_with_bad_gradient, config, (25,), 1e4, 0)[0]
    assert torch.equal(weights[25], weights[24])
    assert [line["skipped"] for line in metric_lines(config.run.dir)] == [0] * 24 + [1] * 6


def train_with_nan_weight(config):
    trainer = build_trainer(config)
    save = trainer.checkpoints.save

    def save_with_nan(*args):
        next(trainer.stage.module.parameters()).data.view(-1)[0] = math.nan
        save(*args)

    trainer.checkpoints.save = save_with_nan
    trainer.run()


def test_non_finite_weights_are_never_saved(ranks, tiny):
    config = tiny("train.steps=2", "checkpoint.every=2")
    with pytest.raises(RankFailure, match="after step 2 weights or optimizer states are not finite"):
        ranks.run(2, train_with_nan_weight, config)
    assert not (Path(config.run.dir) / "checkpoints").exists()


@pytest.mark.parametrize("state", [{"loss": {"count": 1, "median": 2.0}}, {"accuracy": {"count": 1}}])
def test_a_state_with_unknown_names_is_one_line(state):
    with pytest.raises(ConfigError, match=r"the checkpoint's monitor.*; use another checkpoint"):
        LossMonitor(TrainConfig(), 1e-3).restore(state)
