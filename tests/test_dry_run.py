"""A dry run checks and predicts everything, and starts and writes nothing."""

import pytest

from gpt4d import dry_run
from gpt4d.checkpoint import space
from gpt4d.config import ConfigError
from gpt4d.validation import validate
from tests.support.chat import chat_overrides
from tests.support.jobs import run_command


def test_a_dry_run_predicts_the_run_and_leaves_nothing_behind(ranks, corpus, tmp_path):
    words = ["data=text", f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    more = ["cluster=perlmutter", "parallel.mode=auto", "run.world_size=8"]
    done = run_command(ranks.context, "train.py", *words, *more, "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in (
        "text: 40 file(s)",
        "a tokenizer of up to",
        "on 8 device(s) of perlmutter",
        "of 40 GiB of a device",
        "a step takes",
        "600 steps",
        "device-hours",
        "per checkpoint",
        "nothing was started",
    ):
        assert part in done.stdout, done.stdout
    assert not done.stderr and not any(tmp_path.iterdir())


def test_a_dry_run_names_what_cannot_be_read_or_written(tiny, tmp_path, monkeypatch):
    config = tiny("data=tokens", f"data.path={tmp_path}")
    plan = validate(tiny(), 1)
    with pytest.raises(ConfigError, match="no token files; write them with python -m"):
        dry_run.report(plan, config)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"run\.dir=.*: a checkpoint takes .* and 1 kB are free"):
        dry_run.report(plan, tiny())


def test_a_dry_run_counts_the_files_of_validation_sets(tiny, tmp_path):
    (tmp_path / "header.json").write_text("{}")
    config = tiny(f"data.validation={{metrics: tests/test_metrics.py, books: {tmp_path}}}")
    report = dry_run.report(validate(config, 1), config)
    assert "validation set metrics: 1 file(s), " in report and f"validation set books: {tmp_path}" in report


def test_a_dry_run_counts_the_files_of_conversations(tiny, tmp_path):
    config = tiny(*chat_overrides(tmp_path))
    report = dry_run.report(validate(config, 1), config)
    assert "chat: 1 file(s)" in report and f"tokenizer {tmp_path / 'tokenizer' / 'tokenizer.json'}" in report


def test_a_start_without_space_for_a_checkpoint_is_one_line(tiny, monkeypatch):
    from gpt4d.run import train

    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"run\.dir=.*: a checkpoint takes .* and 1 kB are free"):
        train(tiny())


def test_a_sweep_has_no_dry_run():
    assert dry_run.dry_arguments(["a=1"]) == ["a=1"]
    assert dry_run.dry_arguments(["--dry-run", "a=1"]) == ["a=1", "run.dry=true"]
    with pytest.raises(ConfigError, match="--dry-run: a sweep has several runs"):
        dry_run.dry_arguments(["-m", "--dry-run", "optim.lr=1,2"])


def test_another_number_of_devices_is_for_dry_runs_only(tiny):
    with pytest.raises(ConfigError, match=r"run\.world_size=8: a run has as many devices as processes; add --dry-run"):
        validate(tiny("run.world_size=8"), 1)
