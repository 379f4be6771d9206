"""Learning-rate schedules: against torch and transformers, and decays that branch off a run."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import optimization

from gpt4d.checkpoint.checkpoint_dir import Checkpoint, Meta, Progress
from gpt4d.config import ConfigError, OptimConfig, recorded_settings
from gpt4d.optim.schedule import learning_rate
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.settings import configured

STEPS, WARMUP = 110, 10
WSD = "optim.schedule=wsd"
BRANCH = f"{WSD} optim.decay_from=400 train.steps=500"


def rates(schedule, **settings):
    config = OptimConfig(lr=0.3, warmup_steps=WARMUP, schedule=schedule, **settings)
    return [learning_rate(step, config, STEPS) for step in range(STEPS + 10)]


def rates_of(build):
    """Return the rates of a scheduler of torch, which ``build`` makes for an optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler, found = build(optimizer), []
    for _ in range(STEPS + 10):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant", "inverse_sqrt"])
def test_every_schedule_warms_up_linearly_to_lr_in_the_last_step_of_the_warm_up(schedule):
    assert rates(schedule)[:WARMUP] == pytest.approx([0.3 * (step + 1) / WARMUP for step in range(WARMUP)])
    no_warmup = OptimConfig(lr=0.3, warmup_steps=0, schedule=schedule)
    assert learning_rate(0, no_warmup, STEPS) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("schedule", "build"),
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS - WARMUP, eta_min=0.03)),
        ("linear", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS - WARMUP)),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_after_the_warm_up_the_rates_equal_those_of_torchs_scheduler(schedule, build):
    expected = rates_of(build)[: STEPS - WARMUP + 1]  # torch's cosine rises again after its end
    assert rates(schedule)[WARMUP : STEPS + 1] == pytest.approx(expected, rel=1e-12)
    assert rates(schedule)[STEPS:] == pytest.approx(10 * [expected[-1]], rel=1e-12)


@pytest.mark.parametrize("shape", ["sqrt", "linear", "cosine"])
def test_wsd_is_constant_and_then_decays_as_in_transformers(shape):
    def build(optimizer):
        decay_type = "1-sqrt" if shape == "sqrt" else shape
        return optimization.get_wsd_schedule(optimizer, WARMUP, 33, STEPS, decay_type=decay_type, min_lr_ratio=0.1)

    found = rates("wsd", decay_fraction=0.3, decay_shape=shape)
    assert found[WARMUP:] == pytest.approx(rates_of(build)[WARMUP:], rel=1e-12)
    assert found[WARMUP:77] == [0.3] * (77 - WARMUP), "the stable rate is lr to the last bit"


def test_linear_and_inverse_sqrt_are_transformers_schedules_of_which_the_latter_counts_from_1():
    def linear(optimizer):
        return optimization.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)

    def inverse_sqrt(optimizer):
        return optimization.get_inverse_sqrt_schedule(optimizer, WARMUP)

    assert rates("linear", min_lr_ratio=0.0)[WARMUP:] == pytest.approx(rates_of(linear)[WARMUP:], rel=1e-12)
    assert rates("inverse_sqrt")[:-1] == pytest.approx(rates_of(inverse_sqrt)[1:], rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedule_steps_sets_the_end_of_a_decay_independent_of_the_run(schedule):
    config = OptimConfig(warmup_steps=0, schedule=schedule, schedule_steps=50)
    assert learning_rate(45, config, 10) == learning_rate(45, config, 1000) < config.lr
    assert learning_rate(50, config, 1000) == pytest.approx(config.lr * config.min_lr_ratio)


MISTAKES = [
    ("optim.schedule=step", "^optim.schedule=step: use one of cosine, linear, wsd, constant, inverse_sqrt"),
    ("optim.decay_fraction=0", "^optim.decay_fraction=0.0: use a value above 0"),
    ("optim.decay_fraction=1.1", "^optim.decay_fraction=1.1: use a value of at most 1"),
    ("optim.decay_from=300", "^optim.decay_from=300: optim.schedule=cosine does not read it; set " + WSD),
    (f"{WSD} optim.decay_from=600",
     "^optim.decay_from=600: the decay ends with the run, at step 600; use an earlier step, or raise train.steps"),
    (f"{WSD} optim.decay_from=20",
     "^optim.decay_from=20: the decay begins at step 20, before the end of the warm-up of optim."),
    (f"{WSD} train.steps=50",
     "^optim.decay_fraction=0.2: the decay begins at step 40, before the end of the warm-up of "),
    (f"{WSD} optim.decay_from=60 optim.schedule_steps=900",
     "^optim.schedule_steps=900: optim.decay_from=60 decays until the end of the run; leave it out"),
]  # fmt: skip


def test_a_mistake_in_a_schedule_is_one_line():
    def report(overrides):
        validate(configured(["optim.warmup_steps=50", *overrides.split()]), 1)

    assert not wrong_messages(MISTAKES, report)


def test_a_decay_before_the_end_of_the_warm_up_is_found_once_the_data_decide_the_length(ranks, tiny):
    config = tiny("optim.schedule=wsd", "train.steps=600", "train.epochs=1", "optim.warmup_steps=50")
    validate(config, 1)
    with pytest.raises(RankFailure, match=r"optim\.decay_fraction=0\.2: the decay begins at .* or raise train\.epochs"):
        ranks.run(1, train_in_rank, config)


STABLE = {
    "constant": ["optim.schedule=constant"],
    "wsd": ["optim.schedule=wsd", "optim.schedule_steps=40", "optim.decay_shape=linear", "optim.decay_fraction=0.5"],
}


def lines_of(run_dir):
    return [(line["step"], line["lr"], line["loss"], line["grad_norm"]) for line in metric_lines(run_dir)]


def test_a_decay_that_branches_off_a_stable_run_equals_a_run_with_that_decay_to_the_last_bit(ranks, tiny, tmp_path):
    straight = tiny("optim.schedule=wsd", "optim.decay_fraction=0.25", "train.steps=12")
    ranks.run(1, train_in_rank, straight)
    expected = lines_of(straight.run.dir)
    assert [lr for _, lr, *_ in expected[5:9]] == 4 * [0.005] and expected[-1][1] < 0.002
    for name, stable in STABLE.items():
        trunk = tmp_path / name
        ranks.run(1, train_in_rank, tiny(*stable, "train.steps=10", "checkpoint.every=9", f"run.dir={trunk}"))
        decay = ["optim.schedule=wsd", "optim.decay_from=9", "train.steps=12", f"run.dir={tmp_path / name}-decay"]
        branch = tiny(*decay, f"checkpoint.resume={trunk / 'checkpoints/step_00000009'}")
        ranks.run(1, train_in_rank, branch)
        assert lines_of(trunk)[:9] + lines_of(branch.run.dir) == expected
        checkpoint = Checkpoint(Path(branch.run.dir) / "checkpoints/step_00000012")
        assert not checkpoint.check_settings(tiny(*decay)), "the branch resumes without its first checkpoint"


def checkpoint_at(step, *overrides):
    """Return a checkpoint without files, of a run with the default configuration and overrides."""
    config = configured(["optim.warmup_steps=50", *overrides])
    checkpoint = Checkpoint(Path("runs/trunk"))
    meta = Meta(Progress(step), config.model, [], "", {}, settings=recorded_settings(asdict(config)))
    vars(checkpoint)["meta"] = meta  # in place of the files
    return checkpoint


@pytest.mark.parametrize(
    ("step", "trunk", "branch", "message"),
    [
        (450, "optim.schedule=constant", "", r"decay_from=400: .* the rates of runs/trunk after step 401; set"),
        (400, "optim.schedule=cosine", "", r"decay_from=400: .* from the rates of runs/trunk after step 51; set"),
        (400, f"{WSD} train.steps=450", "", r"decay_from=400: .* after step 361; set checkpoint.resume"),
        (400, "optim.schedule=constant", "optim.warmup_steps=60", r"decay_from=400: .* after step 0; set"),
        (400, "optim.schedule=constant", "optim.beta1=0.8", r"optim.beta1=0.8: runs/trunk has 0.9; restore"),
        (400, BRANCH, "optim.decay_shape=linear", r"optim.decay_shape=linear: runs/trunk has sqrt; restore"),
        (400, BRANCH, "optim.decay_from=null", r"optim.decay_from=None: runs/trunk has 400; restore"),
    ],
)
def test_a_branch_that_changes_the_past_or_more_than_the_schedule_is_refused(step, trunk, branch, message):
    words, checkpoint = f"optim.warmup_steps=50 {BRANCH} {branch}".split(), checkpoint_at(step, *trunk.split())
    with pytest.raises(ConfigError, match=message):
        checkpoint.check_settings(configured(words))
    assert checkpoint.check_settings(configured([*words, "checkpoint.allow_changes=[optim]"]))
