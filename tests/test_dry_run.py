"""A dry run checks and predicts everything, and starts and writes nothing."""

import pytest

from gpt4d.checkpoint import space
from gpt4d.config import ConfigError, compose
from gpt4d.training import dry_run
from gpt4d.training.run import train
from gpt4d.validation import validate
from tests.support.chat import chat_overrides
from tests.support.commands import TRAIN
from tests.support.jobs import run_command

DRY_RUN = (
    "text: 40 file(s)", "a tokenizer of up to", "on 8 device(s) of perlmutter", "of 40 GiB of a device",
    "a step takes", "600 steps", "device-hours", "published runs", "per checkpoint", "nothing was started",
)  # fmt: skip


def test_a_dry_run_predicts_the_run_and_leaves_nothing_behind(ranks, corpus, tmp_path):
    words = ["data=text", f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    more = ["cluster=perlmutter", "parallel.mode=auto", "run.world_size=8", "model=gpt_125m", "train.batch_size=64"]
    done = run_command(ranks.context, TRAIN, *words, *more, "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in DRY_RUN:
        assert part in done.stdout, done.stdout
    assert not done.stderr and not any(tmp_path.iterdir())


@pytest.fixture
def full_disk(monkeypatch):
    """Leave 1 kB of the disk free, and return the message of a start."""
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    return r"run\.dir=.*: a checkpoint takes .* and 1 kB are free"


def test_a_dry_run_names_what_cannot_be_read_or_written(tiny, tmp_path, full_disk):
    plan = validate(tiny(), 1)
    with pytest.raises(ConfigError, match="no token files; write them with python -m"):
        dry_run.report(plan, compose(["data=tokens", f"data.path={tmp_path}"]), {})
    with pytest.raises(ConfigError, match=full_disk):
        dry_run.report(plan, tiny(), {})
    with pytest.raises(ConfigError, match=full_disk):
        train(tiny())


def test_a_dry_run_counts_the_files_of_validation_sets_and_of_conversations(tiny, tmp_path):
    (tmp_path / "header.json").write_text("{}")
    (tmp_path / "page.txt").write_text("words")
    config = tiny(f"data.validation={{pages: {tmp_path}/page.txt, books: {tmp_path}}}")
    report = dry_run.report(validate(config, 1), config, {"model.vocab_size": "the tokenizer"})
    assert "validation set pages: 1 file(s), " in report and f"validation set books: {tmp_path}" in report
    assert "model.vocab_size=300: the tokenizer" in report
    config = tiny(*chat_overrides(tmp_path))
    report = dry_run.report(validate(config, 1), config, {})
    assert "chat: 1 file(s)" in report and f"tokenizer {tmp_path / 'tokenizer' / 'tokenizer.json'}" in report


def test_a_sweep_has_no_dry_run():
    assert dry_run.dry_arguments(["a=1"]) == ["a=1"]
    assert dry_run.dry_arguments(["--dry-run", "a=1"]) == ["a=1", "run.dry=true"]
    with pytest.raises(ConfigError, match="--dry-run: a sweep has several runs"):
        dry_run.dry_arguments(["-m", "--dry-run", "optim.lr=1,2"])
