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

from gpt4d.checkpoint import checkpoint_dir, storage, tensor_files
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import ConfigError, GridSizes
from gpt4d.runtime.files import FileEntry, write_file
from tests.support.checkpoints import names, save_state
from tests.support.faults import losses
from tests.support.grids import full, train_in_rank
from tests.support.rank_pool import RankFailure


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("pristine")
    ranks.run(2, save_state, GridSizes(1, 1, 2), False, run_dir)
    return checkpoint_dir.committed(run_dir)[0]


@pytest.fixture
def copy(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "copy")


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def reverse(path):
    path.write_bytes(path.read_bytes()[::-1])  # same length, other content


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


FILES = ["manifest.json", "meta.json", "rank_00000.bin", "rank_00001.bin", "tensors.json", "tokenizer.json"]
DAMAGES = [flip_bit, truncate, reverse, Path.unlink, link, pipe]
# Each file has two kinds of damage, and each kind strikes two files.
SAMPLE = {(name, (n + shift) % 6) for n, name in enumerate(FILES) for shift in (0, 1)}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage) if (name, n) in SAMPLE else full(name, damage)
        for name in FILES
        for n, damage in enumerate(DAMAGES)
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_any_damage_to_any_file_is_reported_by_file_name(copy, capsys, name, damage):
    main(["verify", f"checkpoint={copy}"])
    assert "intact, 5 files" in capsys.readouterr().out
    damage(copy / name)
    with pytest.raises(ConfigError, match="1 of 1 checkpoints failed: copy"):
        main(["verify", f"checkpoint={copy}"])
    kind = r": (a link|not a regular file)" if damage in (link, pipe) else ""
    assert re.search(f"DAMAGED, {re.escape(str(copy / name))}{kind}", capsys.readouterr().out)


def rewrite(directory, change_index=None, change_entries=None):
    """Change the index or the manifest of a checkpoint, and update its manifest, as an attacker could."""
    entries = tensor_files.read_manifest(directory)
    if change_index:
        index = json.loads((directory / "tensors.json").read_text())
        change_index(index)
        (directory / "tensors.json").unlink()
        entries["tensors.json"] = write_file(directory / "tensors.json", json.dumps(index).encode())
    if change_entries:
        change_entries(entries)
    (directory / "manifest.json").unlink()
    tensor_files.write_manifest(directory, entries)


NAME, UNKNOWN = "model.blocks.0.mlp.up.weight", "model.blocks.7.mlp.up.weight"
EMPTY, SINGLE = ([[[0, 0], sizes, "rank_00000.bin", 0]] * 60_000 for sizes in ([0, 1], [1, 1]))


def with_chunk(number, position, value):
    """Return a change of an index: a value of one chunk of a tensor."""
    return lambda index: index[NAME]["chunks"][number].__setitem__(position, value)


def overlapping(index):
    index[NAME]["chunks"][1][0] = index[NAME]["chunks"][0][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update({UNKNOWN: index[NAME]}), f"{UNKNOWN} is not a tensor of this model"),
        (lambda index: index[NAME]["chunks"].extend(EMPTY), "a chunk is empty"),
        (lambda index: index[NAME].update(shape=[200, 300], chunks=SINGLE), "two chunks overlap"),
        (with_chunk(0, 2, "../../../../etc/passwd"), "is not listed in the manifest"),
        (with_chunk(0, 3, 1 << 40), "a chunk lies outside rank_0000"),
        (overlapping, "two chunks overlap"),
        (with_chunk(1, 0, [1000, 0]), "a chunk exceeds the tensor's shape"),
        (lambda index: index[NAME]["chunks"].pop(1), "differ in their number of elements"),
        (lambda index: index.pop(NAME), f"{NAME} of shape .* is missing"),
    ],
)
def test_forged_index_is_rejected(copy, capsys, change, message):
    rewrite(copy, change)
    with pytest.raises(ConfigError, match="1 of 1 checkpoints failed"):
        main(["verify", f"checkpoint={copy}"])
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "../a", "a\nb", None])
def test_a_manifest_with_a_name_that_no_file_has_or_without_the_tokenizer_is_damaged(copy, name):
    rewrite(
        copy, change_entries=lambda all: all.update({name: FileEntry(0, "")}) if name else all.pop("tokenizer.json")
    )
    assert (copy / "tokenizer.json").exists()
    problem = "damaged .* is not a file name in this directory" if name else r"tokenizer\.json is not listed"
    with pytest.raises(Damaged, match=rf"manifest\.json: {problem}"):
        storage.verify(Checkpoint(copy))


def test_chunks_cover_a_tensor_once_whatever_their_order():
    places = [((row, 2 * column), (1, 2)) for row in range(30) for column in range(20)][::-1]
    chunks = [tensor_files.Chunk(offsets, sizes, "rank_00000.bin", 0) for offsets, sizes in places]
    assert tensor_files.StoredTensor(torch.float32, (30, 40), chunks).problem() is None
    chunks[7] = chunks[7]._replace(offsets=chunks[8].offsets)
    assert tensor_files.StoredTensor(torch.float32, (30, 40), chunks).problem() == "two chunks overlap"


def test_checkpoints_contain_no_pickles_and_none_is_opened(pristine, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    checkpoint = Checkpoint(pristine)
    storage.verify(checkpoint)
    for name in checkpoint.files.tensors:
        checkpoint.files.global_tensor(name)
    for path in pristine.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path.name} is a pickle or a zip archive"


def test_manifest_with_paths_outside_the_directory_is_rejected(tmp_path):
    with pytest.raises(Damaged, match="not a file name in this directory"):
        tensor_files.check_files(tmp_path, {"../other": FileEntry(0, "")}, ["../other"])


def test_run_resumes_from_the_newest_intact_checkpoint_and_reports_it(ranks, tiny):
    settings = ("checkpoint.every=2", "checkpoint.keep=3", "optim.schedule_steps=8", "parallel.gz=2")
    run = tiny("train.steps=6", *settings)
    ranks.run(2, train_in_rank, run)
    run_dir = Path(run.run.dir)
    checkpoints = run_dir / "checkpoints"
    flip_bit(checkpoints / "step_00000006" / "rank_00001.bin")
    (checkpoints / "step_00000004" / "meta.json").unlink()
    end = ("train.steps=8", "optim.schedule_steps=8")
    ranks.run(2, train_in_rank, tiny(*end, "parallel.gz=2"))
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"event"' in line]
    reported = [event for event in events if event["event"] in ("damaged", "resume")]
    assert [event["event"] for event in reported] == ["damaged", "damaged", "resume", "damaged", "damaged"]
    assert "step_00000006/rank_00001.bin" in reported[0]["problem"] and "meta.json" in reported[1]["problem"]
    assert reported[2]["step"] == 2
    straight = tiny("train.steps=8", "run.dir=" + run.run.dir + "-straight", "parallel.gz=2")
    ranks.run(2, train_in_rank, straight)
    assert losses(run) == losses(straight)
    assert names(run_dir) == ["step_00000002", "step_00000008"]
    # With only damaged checkpoints, no run starts over. Damage that one rank finds is raised on all ranks.
    rewrite(checkpoints / "step_00000002", overlapping)
    truncate(checkpoints / "step_00000008" / "rank_00000.bin")
    with pytest.raises(RankFailure, match=r"rank_00000.bin: [0-9,]+ bytes long"):
        ranks.run(1, train_in_rank, tiny(*end, "run.dir=" + run.run.dir + "-other", f"checkpoint.resume={run.run.dir}"))
    with pytest.raises(RankFailure, match=r"all 2 checkpoint.s. are damaged; restore an intact") as raised:
        ranks.run(2, train_in_rank, tiny(*end, "parallel.gz=2"))
    assert str(raised.value).count("are damaged;") == 2


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


def test_checkpoint_renamed_to_another_step_is_damaged(copy):
    renamed = copy.rename(copy.with_name("step_00000009"))
    with pytest.raises(Damaged, match=r"renamed, meta\.json is of step 3"):
        storage.verify(Checkpoint(renamed))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model", {"layers": layers}) for layers in ("x", 1.5, 1_000_000)),
        ("model", {"heads": 0}),
        ("model", {"norm_epsilon": "x"}),
        ("progress", {"step": -1}),
        ("identity", {"data": "\x1b[2J"}),
        ("grids", 3),
    ],
)
def test_invalid_values_in_meta_are_damaged(pristine, tmp_path, key, value):
    values = json.loads((pristine / "meta.json").read_text())
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
    (tmp_path / "meta.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"meta\.json: damaged"):
        checkpoint_dir.Meta.read(tmp_path)
