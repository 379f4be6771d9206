"""Whatever happens to a file of a checkpoint is noticed, and a foreign one can do no harm."""

import errno
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from gpt4d.checkpoint import checkpoint_dir, manifest, verifying
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.manifest import Damaged
from gpt4d.config import ConfigError, GridSizes
from gpt4d.files import FileEntry, write_file
from tests.checkpoint import saved_by
from tests.grids import metric_lines, train_in_rank
from tests.rank_pool import RankFailure


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("pristine")
    ranks.run(2, saved_by, GridSizes(1, 1, 2), False, run_dir)
    return checkpoint_dir.committed(run_dir)[0]


FILES = ["manifest.json", "meta.json", "rank_00000.bin", "rank_00001.bin", "tensors.json", "tokenizer.json"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def another_runs(path):
    path.write_bytes(path.read_bytes()[::-1])  # as long, but not what was written


@pytest.mark.parametrize("harm", [flip_a_bit, truncate, another_runs, Path.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_any_harm_to_any_file_is_told_by_its_name(pristine, tmp_path, capsys, name, harm):
    directory = tmp_path / "copy"
    shutil.copytree(pristine, directory)
    main(["verify", f"checkpoint={directory}"])
    assert "whole, 5 files" in capsys.readouterr().out
    harm(directory / name)
    with pytest.raises(ConfigError, match="1 of 1 not whole: copy"):
        main(["verify", f"checkpoint={directory}"])
    assert f"DAMAGED, {directory / name}" in capsys.readouterr().out


def rewritten(pristine, directory, change):
    """A copy whose index was changed and whose manifest agrees: no accident, but somebody's doing."""
    shutil.copytree(pristine, directory)
    index = json.loads((directory / "tensors.json").read_text())
    change(index)
    entries = manifest.read(directory)
    for name in ("tensors.json", "manifest.json"):
        (directory / name).unlink()
    entries["tensors.json"] = write_file(directory / "tensors.json", json.dumps(index).encode())
    manifest.write(directory, entries)
    return directory


NAME = "model.blocks.0.mlp.up.weight"


def reach_outside(index):
    index[NAME]["chunks"][0][2] = "../../../../etc/passwd"


def beyond_the_end(index):
    index[NAME]["chunks"][0][3] = 1 << 40


def overlapping(index):
    index[NAME]["chunks"][1][0] = index[NAME]["chunks"][0][0]


def out_of_the_tensor(index):
    index[NAME]["chunks"][1][0] = [1000, 0]


def one_missing(index):
    del index[NAME]["chunks"][1]


def no_such_tensor(index):
    del index[NAME]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (reach_outside, "is not a file of the manifest"),
        (beyond_the_end, "is not in rank_0000.+, where it says"),
        (overlapping, "two of its chunks overlap"),
        (out_of_the_tensor, "a chunk reaches out of it"),
        (one_missing, "its chunks have not as many elements"),
        (no_such_tensor, f"{NAME} of shape .* is missing"),
    ],
)
def test_an_index_that_lies_is_refused(pristine, tmp_path, capsys, change, said):
    directory = rewritten(pristine, tmp_path / "copy", change)
    with pytest.raises(ConfigError, match="1 of 1 not whole"):
        main(["verify", f"checkpoint={directory}"])
    assert re.search(said, capsys.readouterr().out)


def test_nothing_of_a_checkpoint_is_ever_unpickled(pristine, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    files = verifying.verify(pristine)
    for name in files.tensors:
        files.whole(name)
    for path in pristine.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path.name} is a pickle or an archive of them"


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path):
    entry = FileEntry(0, "")
    with pytest.raises(Damaged, match="not the name of a file of this directory"):
        manifest.check(tmp_path, {"../other": entry}, ["../other"])


def test_a_run_takes_the_next_older_that_is_whole_and_says_so(ranks, tiny, capfd):
    whole = tiny("train.steps=6", "checkpoint.every=2", "checkpoint.keep=3", "optim.schedule_steps=8")
    ranks.run(2, train_in_rank, whole)
    run_dir = Path(whole.run.dir)
    checkpoints = run_dir / "checkpoints"
    flip_a_bit(checkpoints / "step_00000006" / "rank_00001.bin")
    (checkpoints / "step_00000004" / "meta.json").unlink()
    ranks.run(2, train_in_rank, tiny("train.steps=8", "optim.schedule_steps=8"))
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"event"' in line]
    told = [event for event in events if event["event"] in ("damaged", "resume")]
    assert [event["event"] for event in told] == ["damaged", "damaged", "resume", "damaged", "damaged"]
    assert "step_00000006/rank_00001.bin" in told[0]["problem"] and "meta.json" in told[1]["problem"]
    assert told[2]["step"] == 2
    straight = tiny("train.steps=8", "run.dir=" + whole.run.dir + "-straight")
    ranks.run(2, train_in_rank, straight)
    losses = {line["step"]: line["loss"] for line in metric_lines(run_dir)}
    assert losses == {line["step"]: line["loss"] for line in metric_lines(straight.run.dir)}
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000002", "step_00000008"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(ranks, tiny):
    run = tiny("train.steps=2")
    ranks.run(1, train_in_rank, run)
    truncate(Path(run.run.dir) / "checkpoints" / "step_00000002" / "rank_00000.bin")
    with pytest.raises(RankFailure, match=r"each of its 1 checkpoint.s. is damaged; put one back"):
        ranks.run(1, train_in_rank, tiny("train.steps=3"))
    with pytest.raises(RankFailure, match=r"rank_00000.bin: [0-9,]+ bytes long"):
        ranks.run(1, train_in_rank, tiny("run.dir=" + run.run.dir + "-other", f"checkpoint.resume={run.run.dir}"))


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "tensors.json", "rank_00000.bin"])
def test_a_disk_that_cannot_be_read_now_is_not_called_damage(pristine, monkeypatch, name):
    opened = os.open

    def out_of_reach(path, *args):
        if Path(path).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", out_of_reach)
    with pytest.raises(ConfigError, match=f"{name}: Input/output error") as raised:
        verifying.verify(pristine)
    assert not isinstance(raised.value, Damaged)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [link, pipe], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_no_files_of_a_checkpoint(pristine, tmp_path, name, harm):
    directory = tmp_path / "copy"
    shutil.copytree(pristine, directory)
    harm(directory / name)
    with pytest.raises(Damaged, match=rf"{name}: (a link|not a file)"):
        verifying.verify(directory)


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "step_00000009")
    with pytest.raises(Damaged, match=r"renamed, meta\.json says that it is of step 3"):
        verifying.verify(tmp_path / "step_00000009")


@pytest.mark.parametrize(
    "meta",
    [{"model": {"layers": "x"}}, {"model": {"heads": 0}}, {"progress": {"step": -1}}, {"data": "\x1b[2J"}, {"grid": 3}],
)
def test_a_meta_that_makes_no_sense_is_damaged(pristine, tmp_path, meta):
    values = json.loads((pristine / "meta.json").read_text())
    for key, value in meta.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"meta\.json: damaged"):
        checkpoint_dir.Meta.read(tmp_path)


def test_what_one_rank_finds_wrong_all_ranks_say(ranks, tiny):
    run = tiny("train.steps=2", "parallel.gz=2")
    ranks.run(2, train_in_rank, run)
    (directory,) = checkpoint_dir.committed(Path(run.run.dir))
    rewritten(directory, directory.with_name("copy"), overlapping)
    shutil.rmtree(directory)
    directory.with_name("copy").rename(directory)
    with pytest.raises(RankFailure) as raised:
        ranks.run(2, train_in_rank, tiny("train.steps=3", "parallel.gz=2"))
    assert str(raised.value).count("is damaged; put one back") == 2
