"""Any damage to a checkpoint's files is detected, and an untrusted checkpoint is harmless."""

import errno
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint, Damaged
from gpt4d.config import ConfigError, GridSizes
from gpt4d.files import FileEntry, write_file
from tests.checkpoint import save_state
from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("pristine")
    ranks.run(2, save_state, GridSizes(1, 1, 2), False, run_dir)
    return checkpoint_dir.committed(run_dir)[0]


FILES = ["manifest.json", "meta.json", "rank_00000.bin", "rank_00001.bin", "tensors.json", "tokenizer.json"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def reverse(path):
    path.write_bytes(path.read_bytes()[::-1])  # same length, other content


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, reverse, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_reported_by_file_name(pristine, tmp_path, capsys, name, damage):
    directory = tmp_path / "copy"
    shutil.copytree(pristine, directory)
    main(["verify", f"checkpoint={directory}"])
    assert "intact, 5 files" in capsys.readouterr().out
    damage(directory / name)
    with pytest.raises(ConfigError, match="1 of 1 checkpoints failed: copy"):
        main(["verify", f"checkpoint={directory}"])
    assert f"DAMAGED, {directory / name}" in capsys.readouterr().out


def rewrite_index(pristine, directory, change):
    """Copy a checkpoint, change its index and update its manifest, as an attacker could."""
    shutil.copytree(pristine, directory)
    index = json.loads((directory / "tensors.json").read_text())
    change(index)
    entries = checkpoint_dir.read_manifest(directory)
    for name in ("tensors.json", "manifest.json"):
        (directory / name).unlink()
    entries["tensors.json"] = write_file(directory / "tensors.json", json.dumps(index).encode())
    checkpoint_dir.write_manifest(directory, entries)
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


def unknown_tensor(index):
    index["model.blocks.7.mlp.up.weight"] = index[NAME]


def many_empty_chunks(index):
    index[NAME]["chunks"] += [[[0, 0], [0, 1], "rank_00000.bin", 0]] * 60_000


def many_overlapping_chunks(index):
    index[NAME]["shape"], index[NAME]["chunks"] = [200, 300], [[[0, 0], [1, 1], "rank_00000.bin", 0]] * 60_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unknown_tensor, r"model\.blocks\.7\.mlp\.up\.weight is not a tensor of this model"),
        (many_empty_chunks, "a chunk is empty"),
        (many_overlapping_chunks, "two chunks overlap"),
        (reach_outside, "is not listed in the manifest"),
        (beyond_the_end, "a chunk lies outside rank_0000"),
        (overlapping, "two chunks overlap"),
        (out_of_the_tensor, "a chunk exceeds the tensor's shape"),
        (one_missing, "differ in their number of elements"),
        (no_such_tensor, f"{NAME} of shape .* is missing"),
    ],
)
def test_forged_index_is_rejected(pristine, tmp_path, capsys, change, message):
    directory = rewrite_index(pristine, tmp_path / "copy", change)
    with pytest.raises(ConfigError, match="1 of 1 checkpoints failed"):
        main(["verify", f"checkpoint={directory}"])
    assert re.search(message, capsys.readouterr().out)


def with_entries(pristine, directory, change):
    """Copy a checkpoint and change its manifest, as an attacker could."""
    shutil.copytree(pristine, directory)
    entries = checkpoint_dir.read_manifest(directory)
    change(entries)
    (directory / "manifest.json").unlink()
    checkpoint_dir.write_manifest(directory, entries)
    return directory


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "../a", "a\nb"])
def test_a_manifest_with_a_name_that_no_file_has_is_damaged(pristine, tmp_path, name):
    directory = with_entries(pristine, tmp_path / "copy", lambda entries: entries.update({name: FileEntry(0, "")}))
    with pytest.raises(Damaged, match=r"manifest\.json: damaged .* is not a file name in this directory"):
        storage.verify(Checkpoint(directory))


def test_a_tokenizer_that_the_manifest_does_not_list_is_damage(pristine, tmp_path):
    directory = with_entries(pristine, tmp_path / "copy", lambda entries: entries.pop("tokenizer.json"))
    assert (directory / "tokenizer.json").exists()
    with pytest.raises(Damaged, match=r"manifest\.json: tokenizer\.json is not listed"):
        storage.verify(Checkpoint(directory))


def test_chunks_cover_a_tensor_once_whatever_their_order():
    places = [((row, 2 * column), (1, 2)) for row in range(30) for column in range(20)][::-1]
    chunks = [storage.Chunk(offsets, sizes, "rank_00000.bin", 0) for offsets, sizes in places]
    assert storage.StoredTensor(torch.float32, (30, 40), chunks).problem() is None
    chunks[7] = chunks[7]._replace(offsets=chunks[8].offsets)
    assert storage.StoredTensor(torch.float32, (30, 40), chunks).problem() == "two chunks overlap"


def test_checkpoints_contain_no_pickles_and_none_is_opened(pristine, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    checkpoint = Checkpoint(pristine)
    storage.verify(checkpoint)
    for name in checkpoint.files.tensors:
        checkpoint.files.global_tensor(name)
    for path in pristine.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path.name} is a pickle or a zip archive"


def test_manifest_with_paths_outside_the_directory_is_rejected(tmp_path):
    entry = FileEntry(0, "")
    with pytest.raises(Damaged, match="not a file name in this directory"):
        checkpoint_dir.check_files(tmp_path, {"../other": entry}, ["../other"])


def test_run_resumes_from_the_newest_intact_checkpoint_and_reports_it(ranks, tiny, capfd):
    run = tiny("train.steps=6", "checkpoint.every=2", "checkpoint.keep=3", "optim.schedule_steps=8")
    ranks.run(2, train_in_rank, run)
    run_dir = Path(run.run.dir)
    checkpoints = run_dir / "checkpoints"
    flip_a_bit(checkpoints / "step_00000006" / "rank_00001.bin")
    (checkpoints / "step_00000004" / "meta.json").unlink()
    ranks.run(2, train_in_rank, tiny("train.steps=8", "optim.schedule_steps=8"))
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"event"' in line]
    reported = [event for event in events if event["event"] in ("damaged", "resume")]
    assert [event["event"] for event in reported] == ["damaged", "damaged", "resume", "damaged", "damaged"]
    assert "step_00000006/rank_00001.bin" in reported[0]["problem"] and "meta.json" in reported[1]["problem"]
    assert reported[2]["step"] == 2
    straight = tiny("train.steps=8", "run.dir=" + run.run.dir + "-straight")
    ranks.run(2, train_in_rank, straight)
    losses = {line["step"]: line["loss"] for line in metric_lines(run_dir)}
    assert losses == {line["step"]: line["loss"] for line in metric_lines(straight.run.dir)}
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000002", "step_00000008"]


def test_run_with_only_damaged_checkpoints_does_not_start_over(ranks, tiny):
    run = tiny("train.steps=2")
    ranks.run(1, train_in_rank, run)
    truncate(Path(run.run.dir) / "checkpoints" / "step_00000002" / "rank_00000.bin")
    with pytest.raises(RankFailure, match=r"all 1 checkpoint.s. are damaged; restore an intact"):
        ranks.run(1, train_in_rank, tiny("train.steps=3"))
    with pytest.raises(RankFailure, match=r"rank_00000.bin: [0-9,]+ bytes long"):
        ranks.run(1, train_in_rank, tiny("run.dir=" + run.run.dir + "-other", f"checkpoint.resume={run.run.dir}"))


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "tensors.json", "rank_00000.bin"])
def test_unreadable_disk_is_not_reported_as_damage(pristine, monkeypatch, name):
    original = os.open

    def fail(path, *args):
        if Path(path).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path, *args)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ConfigError, match=f"{name}: Input/output error") as raised:
        storage.verify(Checkpoint(pristine))
    assert not isinstance(raised.value, Damaged)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [link, pipe], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_rejected(pristine, tmp_path, name, damage):
    directory = tmp_path / "copy"
    shutil.copytree(pristine, directory)
    damage(directory / name)
    with pytest.raises(Damaged, match=rf"{name}: (a link|not a regular file)"):
        storage.verify(Checkpoint(directory))


def test_checkpoint_renamed_to_another_step_is_damaged(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "step_00000009")
    with pytest.raises(Damaged, match=r"renamed, meta\.json is of step 3"):
        storage.verify(Checkpoint(tmp_path / "step_00000009"))


@pytest.mark.parametrize(
    "meta",
    [
        {"model": {"layers": "x"}},
        {"model": {"layers": 1.5}},
        {"model": {"heads": 0}},
        {"progress": {"step": -1}},
        {"identity": {"data": "\x1b[2J"}},
        {"grids": 3},
        {"model": {"layers": 1_000_000}},
        {"model": {"norm_epsilon": "x"}},
    ],
)
def test_invalid_values_in_meta_are_damaged(pristine, tmp_path, meta):
    values = json.loads((pristine / "meta.json").read_text())
    for key, value in meta.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"meta\.json: damaged"):
        checkpoint_dir.Meta.read(tmp_path)


def test_damage_found_by_one_rank_is_raised_on_all(ranks, tiny):
    run = tiny("train.steps=2", "parallel.gz=2")
    ranks.run(2, train_in_rank, run)
    (directory,) = checkpoint_dir.committed(Path(run.run.dir))
    rewrite_index(directory, directory.with_name("copy"), overlapping)
    shutil.rmtree(directory)
    directory.with_name("copy").rename(directory)
    with pytest.raises(RankFailure) as raised:
        ranks.run(2, train_in_rank, tiny("train.steps=3", "parallel.gz=2"))
    assert str(raised.value).count("are damaged;") == 2
