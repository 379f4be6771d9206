"""The identity of a run: which settings may change between its starts, and the record of its starts."""

import json
from pathlib import Path

import pytest

from gpt4d.config import ConfigError, Effect, effect_of
from gpt4d.config.keys import check_allowed, key_types, stated
from gpt4d.model import registry
from gpt4d.runs import starts
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.run_files import events


def test_a_key_without_an_effect_is_an_error():
    with pytest.raises(KeyError):
        effect_of("new_group.key")


def test_a_key_of_several_model_families_has_one_effect():
    assert effect_of("model.vocab_multiple") is Effect.ROUNDING
    families = [registry.get(name).config for name in ("gpt2", "llama", "olmo2", "gemma3", "moe", "unet")]
    for key in {key for family in families for key in key_types(family, "model.")}:
        found = [family for family in families if key.removeprefix("model.") in family.__dataclass_fields__]
        assert {stated(key, "effect", family)[-1] for family in found} == {effect_of(key)}, key


@pytest.mark.parametrize("entry", ["optim.rate", "parallel.gx", "logging", "lr"])
def test_only_settings_that_change_results_can_be_allowed_to_change(entry):
    with pytest.raises(ConfigError, match=rf"allow_changes=\[{entry}\]: {entry} is not a setting that changes results"):
        check_allowed([entry])
    check_allowed(["optim.lr", "optim", "data", "data.path", "model.dropout"])


@pytest.fixture
def train(ranks, tiny):
    """Return a function that trains with overrides and returns the run's directory."""

    def run(*overrides, world_size=1):
        config = tiny(*overrides)
        ranks.run(world_size, train_in_rank, config)
        return Path(config.run.dir)

    return run


def files_of(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}


def changes_of(run_dir):
    return [(line["key"], line["before"], line["after"]) for line in events(run_dir, "change")]


def test_a_start_with_other_settings_is_refused_and_changes_no_file_of_the_run(train):
    run_dir = train("train.steps=2")
    before = files_of(run_dir)
    expected = (
        r"train\.batch_size=8: .*step_00000002 has 16, train\.seed=3 instead of 0, optim\.lr=0\.004 instead of 0\.005; "
        r".*add checkpoint\.allow_changes=\[train\.batch_size,train\.seed,optim\.lr\]"
    )
    with pytest.raises(RankFailure, match=expected):
        train("train.steps=4", "optim.lr=0.004", "train.seed=3", "train.batch_size=8")
    assert files_of(run_dir) == before


def test_listed_changes_are_reported_and_recorded_and_the_grid_never_blocks(train):
    train("train.steps=2", "train.validate_every=1")
    changed = "train.steps=3", "optim.lr=0.004", "checkpoint.allow_changes=[optim.lr]"
    run_dir = train(*changed, "parallel.gx=2", "train.micro_batch_size=4", world_size=2)
    assert changes_of(run_dir) == [("train.steps", 2, 3), ("optim.lr", 0.005, 0.004)]
    first, second = starts.read(run_dir)
    assert first["differences"] == {}
    assert second["differences"] == {"train.steps": [2, 3], "optim.lr": [0.005, 0.004]}
    assert (first["step"], second["step"], second["grids"]) == (0, 2, ["2x1x1x1"])
    assert sum(second["hosts"].values()) == 2
    for start, rate in ((first, 0.005), (second, 0.004)):
        assert f"lr: {rate}\n" in (run_dir / start["config"]).read_text()
    assert (run_dir / "config.yaml").read_text() == (run_dir / second["config"]).read_text()
    # The new checkpoint has the new rate, so the same command needs no permission any more.
    train("train.steps=4", "optim.lr=0.004")


def test_a_run_without_a_checkpoint_is_compared_with_its_last_start(train):
    with pytest.raises(RankFailure):
        train("optim.lr=1e6", "optim.warmup_steps=0", "train.max_skipped=1")
    with pytest.raises(RankFailure, match=r"optim\.lr=0\.005: .* has 1000000\.0, optim\.warmup_steps=5 instead of 0"):
        train("train.max_skipped=1")


def test_more_steps_say_what_happens_to_the_learning_rate_and_time_passes(train):
    train("train.steps=10")
    run_dir = train("train.steps=20")
    assert changes_of(run_dir) == [("train.steps", 10, 20)]
    rates = {line["step"]: line["lr"] for line in metric_lines(run_dir)}
    assert rates[11] > 3 * rates[10], "the cosine of 20 steps is in its middle"
    assert events(run_dir, "change")[0]["next_lr"] == [pytest.approx(0.0005), rates[11]]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in ("time", "elapsed_s"):
        values = [line[key] for line in lines]
        assert values == sorted(values) and values[-1] > values[0]


@pytest.mark.parametrize("schedule", ["constant", full("inverse_sqrt")])
def test_more_steps_of_a_schedule_without_an_end_change_no_learning_rate(train, schedule):
    train("train.steps=6", f"optim.schedule={schedule}")
    run_dir = train("train.steps=8", f"optim.schedule={schedule}")
    assert changes_of(run_dir) == [("train.steps", 6, 8)] and "next_lr" not in events(run_dir, "change")[0]
