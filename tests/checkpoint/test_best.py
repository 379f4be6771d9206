"""The best checkpoint (checkpoint.keep_best): never removed, marked by a link, and known after a crash or a resume."""

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir, lifecycle, tensor_files
from gpt4d.checkpoint.checkpoint_dir import META, Checkpoint, Meta
from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import ConfigError
from gpt4d.validation import validate
from tests.support.checkpoints import meta, names
from tests.support.commands import wrong_messages
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure

LOSSES = [3.0, 2.0, 2.5, None, 2.7, 1.9, 2.0, 1.9]
BEST = [1, 2, 2, 2, 2, 6, 6, 6]


def write_checkpoint(run_dir, step, **losses):
    """Write the metadata of a committed checkpoint, and return its directory."""
    directory = run_dir / "checkpoints" / checkpoint_dir.name(step)
    directory.mkdir(parents=True)
    (directory / META).write_bytes(replace(meta(step), validation=losses).to_json())
    return directory


def steps(run_dir):
    return [checkpoint_dir.step_of(path) for path in checkpoint_dir.committed(run_dir)]


def marked(run_dir):
    """Return the step that the link names; it leads to a checkpoint."""
    link = run_dir / "checkpoints" / "best"
    assert Checkpoint.open(link).meta.progress.step == Checkpoint(link.resolve()).meta.progress.step
    return checkpoint_dir.step_of(Path(os.readlink(link)))


def test_the_checkpoint_with_the_lowest_loss_is_retained_and_marked(tmp_path):
    for step, (loss, best) in enumerate(zip(LOSSES, BEST, strict=True), start=1):
        newest = write_checkpoint(tmp_path, step, **({} if loss is None else {"books": loss, "code": -step}))
        assert lifecycle.retain(newest, 1, None, "books") == tmp_path / "checkpoints" / checkpoint_dir.name(best)
        assert marked(tmp_path) == best and steps(tmp_path) == sorted({best, step})


def test_the_best_checkpoint_is_an_addition_to_the_newest_ones(tmp_path):
    for step in range(1, 7):
        lifecycle.retain(write_checkpoint(tmp_path, step, books=abs(step - 2.1)), 2, None, "books")
    assert steps(tmp_path) == [2, 5, 6]


def test_without_keep_best_or_without_a_loss_there_is_no_link(tmp_path):
    lifecycle.retain(write_checkpoint(tmp_path, 1, books=1.0), 2, None, "books")
    assert names(tmp_path) == ["best", "step_00000001"]
    lifecycle.retain(write_checkpoint(tmp_path, 2, books=2.0), 2, None, "code")
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    lifecycle.mark_best(tmp_path, "books")
    lifecycle.retain(write_checkpoint(tmp_path, 3, books=2.0), 1, None, None)
    assert names(tmp_path) == ["step_00000003"]


def test_a_crash_at_any_operation_loses_no_best_checkpoint_and_a_start_marks_it_again(tmp_path, monkeypatch):
    operations = [(os, "replace"), (os, "rename"), (os, "symlink"), (os, "unlink"), (shutil, "rmtree")]
    for crash in range(1, 20):
        run_dir, count = tmp_path / str(crash), 0
        for step, loss in ((1, 2.0), (2, 3.0)):
            lifecycle.retain(write_checkpoint(run_dir, step, books=loss), 2, None, "books")

        def counting(original, crash=crash):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == crash:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            return call

        newest = write_checkpoint(run_dir, 3, books=1.0)
        with monkeypatch.context() as patch:
            for module, name in operations:
                patch.setattr(module, name, counting(getattr(module, name)))
            try:
                lifecycle.retain(newest, 1, None, "books")
                break
            except KeyboardInterrupt:
                pass
        assert marked(run_dir) in (1, 3) and 3 in steps(run_dir)
        lifecycle.remove_leftovers(run_dir)
        assert lifecycle.mark_best(run_dir, "books") == newest and marked(run_dir) == 3
    assert crash > 4 and names(run_dir) == ["best", "step_00000003"]


def test_no_checkpoint_is_removed_while_a_loss_cannot_be_read(tmp_path, monkeypatch, capsys):
    for step, loss in ((1, 2.0), (2, 3.0), (3, 4.0)):
        newest = write_checkpoint(tmp_path, step, books=loss)
    with monkeypatch.context() as patch:

        def fail(path):
            raise ConfigError(f"{path}: {os.strerror(errno.EIO)}")

        patch.setattr(tensor_files, "open_regular", fail)
        assert lifecycle.retain(newest, 1, None, "books") is None
    assert steps(tmp_path) == [1, 2, 3]
    assert "the best checkpoint is not known (" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "step_00000001" / META).write_text("damaged")
    lifecycle.retain(newest, 1, None, "books")
    assert marked(tmp_path) == 2 and steps(tmp_path) == [2, 3]


def test_a_file_system_without_links_costs_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    for step, loss in ((1, 2.0), (2, 3.0), (3, 4.0)):
        lifecycle.retain(write_checkpoint(tmp_path, step, books=loss), 1, None, "books")
    assert steps(tmp_path) == [1, 3]
    assert "checkpoints/best cannot be written (Operation not permitted); it should name step_00000001" in (
        capsys.readouterr().err
    )


def test_metadata_with_a_loss_that_is_no_number_are_damaged(tmp_path):
    directory = write_checkpoint(tmp_path, 1, books=1.0)
    assert Meta.read(directory).validation == {"books": 1.0}
    text = (directory / META).read_text().replace('"books": 1.0', '"books": "low"')
    (directory / META).write_text(text)
    with pytest.raises(Damaged, match="validation="):
        Meta.read(directory)


def test_the_error_for_impossible_settings_of_the_best_checkpoint_is_one_line(tiny):
    held_out = ["checkpoint.keep_best=held_out", "checkpoint.every=25"]
    multiple = "checkpoint.every=25 is not a multiple of"
    both = "train.validate_every=10; set checkpoint.every=30, or set train.validate_every=25"
    cases = [
        (["checkpoint.keep_best=books"], "keep_best=books: there is no such validation set; use one of held_out, or"),
        ([*held_out, "train.validate_every=10"], f"{multiple} {both}"),
        ([*held_out, "train.validate_every=0"], f"{multiple} train.validate_every=0; set train.validate_every=25"),
    ]
    assert not wrong_messages(cases, lambda overrides: validate(tiny(*overrides), 1))
    validate(tiny("checkpoint.keep_best=held_out", "checkpoint.every=20", "train.validate_every=10"), 1)
    validate(tiny("checkpoint.keep_best=held_out", "checkpoint.every=0", "train.validate_every=0"), 1)


def test_the_error_for_a_best_checkpoint_without_held_out_text_names_the_key(ranks, tiny):
    config = tiny("checkpoint.keep_best=held_out", "data.validation_fraction=0")
    with pytest.raises(RankFailure, match=r"checkpoint\.keep_best=held_out: the data have no batch of this validation"):
        ranks.run(1, train_in_rank, config)


def test_a_checkpoint_between_validations_has_no_validation_loss(ranks, tiny):
    config = tiny("train.steps=4", "train.validate_every=2", "checkpoint.every=1", "checkpoint.keep=9")
    ranks.run(1, train_in_rank, config)
    checkpoints = checkpoint_dir.committed(Path(config.run.dir))
    assert [list(Checkpoint.open(path).meta.validation) for path in checkpoints] == [[], ["held_out"]] * 2


def test_the_best_checkpoint_survives_a_resume_of_the_run(ranks, tiny, tmp_path):
    (tmp_path / "digits.txt").write_text("0123456789" * 99)  # the longer the run learns words, the worse its loss here
    settings = [
        f"data.validation={{digits: {tmp_path}/digits.txt}}", "checkpoint.keep_best=digits", "checkpoint.every=3",
        "checkpoint.keep=1", "train.validate_every=3", "optim.schedule_steps=30",
    ]  # fmt: skip
    for count in (9, 15):
        config = tiny(*settings, f"train.steps={count}")
        ranks.run(1, train_in_rank, config)
        run_dir = Path(config.run.dir)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["sets"]["digits"]["loss"] for line in lines if line.get("event") == "validation"}
        best = min(losses, key=losses.__getitem__)
        assert list(losses) == list(range(3, count + 1, 3)) and best < 9
        assert steps(run_dir) == [best, count] and marked(run_dir) == best
        stored = Checkpoint.open(run_dir / "checkpoints" / "best").meta.validation
        assert stored["digits"] == losses[best] and math.isfinite(stored["held_out"])
        saved = [line for line in lines if line.get("event") == "checkpoint"]
        assert saved[-1]["best"].endswith(checkpoint_dir.name(best))
    assert metric_lines(run_dir)[-1]["step"] == 15
