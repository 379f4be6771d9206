"""The identity of a run: which settings may change between its starts, and the record of its starts."""

import json
from pathlib import Path

import pytest

from gpt4d import starts
from gpt4d.config import ConfigError, Effect, check_allowed, effect_of, known_keys
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


def test_every_key_has_an_effect():
    assert all(isinstance(effect_of(key), Effect) for key in known_keys())
    with pytest.raises(KeyError):
        effect_of("new_group.key")


@pytest.mark.parametrize("entry", ["optim.rate", "parallel.gx", "logging", "lr"])
def test_only_settings_that_change_results_can_be_allowed_to_change(entry):
    with pytest.raises(ConfigError, match=rf"allow_changes=\[{entry}\]: {entry} is not a setting that changes results"):
        check_allowed([entry])
    check_allowed(["optim.lr", "optim", "data", "data.path", "model.dropout"])


def lines_of(config, event=None):
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]


def test_a_start_with_other_settings_is_refused_and_changes_no_file_of_the_run(ranks, tiny):
    ranks.run(1, train_in_rank, tiny("train.steps=2"))
    run_dir = Path(tiny().run.dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    other = tiny("train.steps=4", "optim.lr=0.004", "train.seed=3", "train.batch_size=8")
    expected = (
        r"train\.batch_size=8: .*step_00000002 has 16, train\.seed=3 instead of 0, optim\.lr=0\.004 instead of 0\.005; "
        r".*add checkpoint\.allow_changes=\[train\.batch_size,train\.seed,optim\.lr\]"
    )
    with pytest.raises(RankFailure, match=expected):
        ranks.run(1, train_in_rank, other)
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_listed_changes_are_reported_and_recorded_and_the_grid_never_blocks(ranks, tiny):
    ranks.run(1, train_in_rank, tiny("train.steps=2", "train.validate_every=1"))
    allowed = "checkpoint.allow_changes=[optim.lr]"
    changed = tiny("train.steps=3", "optim.lr=0.004", allowed, "parallel.gx=2", "train.micro_batch_size=4")
    ranks.run(2, train_in_rank, changed)
    assert [(line["key"], line["before"], line["after"]) for line in lines_of(changed, "change")] == [
        ("train.steps", 2, 3),
        ("optim.lr", 0.005, 0.004),
    ]
    first, second = starts.read(Path(changed.run.dir))
    assert first["differences"] == {}
    assert second["differences"] == {"train.steps": [2, 3], "optim.lr": [0.005, 0.004]}
    assert (first["step"], second["step"], second["grids"]) == (0, 2, ["2x1x1x1"])
    assert sum(second["hosts"].values()) == 2
    for start, rate in ((first, 0.005), (second, 0.004)):
        assert f"lr: {rate}\n" in (Path(changed.run.dir) / start["config"]).read_text()
    assert (Path(changed.run.dir) / "config.yaml").read_text() == (Path(changed.run.dir) / second["config"]).read_text()
    # The new checkpoint has the new rate, so the same command needs no permission any more.
    ranks.run(1, train_in_rank, tiny("train.steps=4", "optim.lr=0.004"))


def test_a_run_without_a_checkpoint_is_compared_with_its_last_start(ranks, tiny):
    config = tiny("optim.lr=1e6", "optim.warmup_steps=0", "train.max_skipped=1")
    with pytest.raises(RankFailure):
        ranks.run(1, train_in_rank, config)
    with pytest.raises(RankFailure, match=r"optim\.lr=0\.005: .* has 1000000\.0, optim\.warmup_steps=5 instead of 0"):
        ranks.run(1, train_in_rank, tiny("train.max_skipped=1"))


def test_more_steps_say_what_happens_to_the_learning_rate(ranks, tiny):
    ranks.run(1, train_in_rank, tiny("train.steps=10"))
    longer = tiny("train.steps=20")
    ranks.run(1, train_in_rank, longer)
    (line,) = lines_of(longer, "change")
    assert (line["key"], line["before"], line["after"]) == ("train.steps", 10, 20)
    rates = {line["step"]: line["lr"] for line in metric_lines(longer.run.dir)}
    assert rates[11] > 3 * rates[10], "the cosine of 20 steps is in its middle"
    assert line["next_lr"] == [pytest.approx(0.0005), rates[11]]


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_more_steps_of_a_schedule_without_an_end_change_no_learning_rate(ranks, tiny, schedule):
    for steps in (6, 8):
        config = tiny(f"train.steps={steps}", f"optim.schedule={schedule}")
        ranks.run(1, train_in_rank, config)
    (line,) = lines_of(config, "change")
    assert (line["key"], line["before"], line["after"]) == ("train.steps", 6, 8) and "next_lr" not in line


def test_time_passes_over_restarts(ranks, tiny):
    for steps in (2, 4):
        ranks.run(1, train_in_rank, tiny(f"train.steps={steps}"))
    lines = [json.loads(line) for line in (Path(tiny().run.dir) / "metrics.jsonl").read_text().splitlines()]
    for key in ("time", "elapsed_s"):
        values = [line[key] for line in lines]
        assert values == sorted(values) and values[-1] > values[0]
