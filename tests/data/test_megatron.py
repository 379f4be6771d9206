"""Megatron's files give its tokens, documents and samples, and errors name the file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpt4d.config import DataConfig
from gpt4d.data import tokenizers
from gpt4d.data.checks import check_data
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.megatron import Index, megatron_files
from gpt4d.data.sampler import DocumentSequences, Sequences
from gpt4d.data.sources import is_held_out
from gpt4d.training.dry_run import report
from gpt4d.validation import validate
from tests.support.chat import write_tokenizer
from tests.support.data_files import END, blend_of, documents_of, one_line, random_documents, write
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


def concatenated(documents):
    return [token for ids in documents for token in ids]


@pytest.fixture
def config(tmp_path):
    return DataConfig("m", "megatron", tokenizer_vocab=300, validation_fraction=0.2, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(("dtype", "sentences"), [("uint16", 1), ("int32", 3), ("int16", 1), ("int64", 2)])
def test_the_splits_have_the_documents_in_order_and_a_hash_of_the_tokens_holds_out(config, tmp_path, dtype, sentences):
    documents = random_documents()
    files = megatron_files(config, write(tmp_path / "a", documents, dtype, sentences))
    held_out = [is_held_out(np.array(ids, dtype).tobytes(), 0.2) for ids in documents]
    for split, chosen in (("train", False), ("validation", True)):
        expected = [ids for ids, held in zip(documents, held_out, strict=True) if held is chosen]
        assert len(expected) > 4 and files.count(split, "documents") == len(expected)
        assert files.tokens(split)[:].tolist() == concatenated(expected)
        assert files.count(split, "tokens") == len(files.tokens(split)) == len(concatenated(expected))
        assert files.document_ends(split).tolist() == np.cumsum([len(ids) for ids in expected]).tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_samples_are_windows_of_the_concatenated_documents_as_in_megatron(config, tmp_path, fraction):
    files = megatron_files(replace(config, validation_fraction=fraction), write(tmp_path / "a", random_documents()))
    tokens = files.tokens("train")[:].tolist()
    samples = Sequences(files.tokens("train"), 16, seed=0, shuffle=False)
    assert samples.count == (len(tokens) - 1) // 16 > 50
    rows = samples.rows(np.arange(samples.count))
    assert rows.tolist() == [tokens[start : start + 17] for start in range(0, samples.count * 16, 16)]


@pytest.mark.parametrize("end", [(END,), ()], ids=["end-of-text tokens", "no end-of-text tokens"])
def test_rows_count_the_documents_that_end_before_a_token(config, tmp_path, end):
    documents = random_documents(end=end)
    files = megatron_files(replace(config, validation_fraction=0.0), write(tmp_path / "a", documents))
    samples = DocumentSequences(files.tokens("train"), files.document_ends("train"), 40, seed=3, shuffle=True)
    tokens = np.array(concatenated(documents))
    numbers = np.repeat(np.arange(len(documents)), [len(ids) for ids in documents])
    rows, positions = samples.rows(np.arange(samples.count)), samples.positions(np.arange(samples.count))
    for row, start in zip(rows, (positions * 40).tolist(), strict=True):
        assert row[0].tolist() == tokens[start : start + 40].tolist()
        assert row[1].tolist() == tokens[start + 1 : start + 41].tolist()
        distinct = np.unique(numbers[start : start + 40], return_inverse=True)[1]
        assert row[2].tolist() == distinct.tolist()  # an empty document has no number
    assert samples.counts(np.arange(5)) == (200, 200)


@pytest.mark.parametrize("begins", [True, False])
def test_the_first_document_shows_whether_documents_begin_with_the_first_token(config, tmp_path, begins):
    source = write_tokenizer(tmp_path / "tokenizer", first=["<|im_end|>"])
    first = tokenizers.read(source / "tokenizer.json").token_to_id("<|im_end|>")
    prefix = write(tmp_path / "a", [[*[first] * begins, 5, 6, 7]] * 20)
    config = replace(config, path=prefix, tokenizer=str(source))
    for chosen in (None, begins):
        assert prepared(replace(config, begin_of_text=chosen)).first.first_tokens == [first] * begins
    with one_line(r"data\.begin_of_text=.*: the documents in .* begin"):
        prepared(replace(config, begin_of_text=not begins))


def test_the_files_are_mapped_and_the_second_start_does_not_read_them(config, tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", random_documents())
    files = megatron_files(config, prefix)
    assert isinstance(files.tokens("train").parts[0].base, np.memmap)
    size = sum(path.stat().st_size for path in files.directory.iterdir() if path.suffix != ".json")
    assert size <= 8 * 60 + 16 * 60
    monkeypatch.setattr("gpt4d.data.sources.is_held_out", lambda *_: pytest.fail("read again"))
    assert megatron_files(config, prefix).checksums() == files.checksums()


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def patch(path, offset, content):
    path.write_bytes(path.read_bytes()[:offset] + content + path.read_bytes()[offset + len(content) :])


LENGTHS = 34  # the first byte of the lengths
DAMAGES = {
    "no .bin": (lambda idx, bin: bin.unlink(), r"a\.bin: No such file or directory; use a prefix"),
    "no .idx": (lambda idx, bin: idx.unlink(), r"a\.idx: No such file or directory; use a prefix"),
    "an empty .idx": (lambda idx, bin: cut(idx, 0), r"a\.idx: truncated, its 0 bytes are no complete header"),
    "half a header": (lambda idx, bin: cut(idx, 20), r"a\.idx: truncated, its 20 bytes are no complete header"),
    "a truncated .idx": (lambda idx, bin: cut(idx, -5), r"a\.idx: truncated, 1,237 bytes instead of 1,242; make both"),
    "another file": (lambda idx, bin: patch(idx, 0, b"TNTIDX"), r"a\.idx: not the index of a Megatron dataset; make"),
    "version 2": (lambda idx, bin: patch(idx, 9, b"\x02"), r"a\.idx: version 2 of the format, and only version 1"),
    "no dtype": (lambda idx, bin: patch(idx, 17, b"\x09"), r"a\.idx: dtype code 9 is not between 1 and 8; make both"),
    "floats": (lambda idx, _: patch(idx, 17, b"\x07"), r"a\.idx: dtype code 7 means float32, but tokens are integers"),
    "a short .bin": (lambda _, bin: cut(bin, -2), r"a\.bin: truncated, [\d,]+ bytes, but .*a\.idx states [\d,]+; make"),
    "a longer sequence": (lambda idx, _: patch(idx, LENGTHS, b"\x07"), "a.idx: damaged, its sequences are not consec"),
    "a lost document": (lambda idx, _: patch(idx, 1242 - 8, b"\x01"), "a.idx: damaged, its documents do not contain"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_cannot_be_used_are_reported_in_one_line(config, tmp_path, damage):
    prefix = write(tmp_path / "a", random_documents())
    change, message = DAMAGES[damage]
    change(tmp_path / "a.idx", tmp_path / "a.bin")
    with one_line(message):
        megatron_files(config, prefix)
    assert not (tmp_path / "cache").exists()


def test_tokens_outside_a_vocabulary_are_rejected(config, tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 299], [3]])
    assert megatron_files(config, prefix).header["largest"] == 299
    (tmp_path / "tokenizer.json").write_text(tokenizers.train(["alpha beta " * 100], 258).to_str())
    for changes, message in (
        ({"tokenizer_vocab": 299}, r"a\.bin: its largest token is 299, and data\.tokenizer_vocab=299; set model\.v"),
        ({"tokenizer": str(tmp_path / "tokenizer.json")}, r"it has 258 tokens, and the largest .*a\.bin is 299; use"),
    ):
        with one_line(message):
            megatron_files(replace(config, **changes), prefix)


def test_files_without_a_token_to_train_on_are_rejected(config, tmp_path):
    for documents, fraction, message in (
        ([], 0.0, r"a\.bin: there is no token to train on"),
        ([[], []], 0.0, r"a\.bin: there is no token to train on"),
        ([[1], [2]], 0.9999, r"a: every document is held out; set data\.validation_fraction=0"),
        ([[1], [2, -1]], 0.2, r"a\.bin: one of its tokens is -1; make the file again"),
    ):
        with one_line(message):
            megatron_files(replace(config, validation_fraction=fraction), write(tmp_path / "a", documents, "int32"))


def test_settings_that_do_not_fit_are_rejected_before_a_process_group_exists(config, tiny, tmp_path):
    prefix = write(tmp_path / "a", random_documents())
    check_data(replace(config, path=prefix), "gpt_tiny")
    for path, message in (
        (f"{prefix}.bin", rf"data\.path={prefix}\.bin: there is no .*a\.bin\.idx; set data\.path={prefix}$"),
        ("nowhere", r"data\.path=nowhere: there is no nowhere\.idx; set the prefix of Megatron"),
        (None, r"data\.path=null: data\.source=megatron needs a path; set the prefix"),
    ):
        with one_line(message):
            check_data(replace(config, path=path), "gpt_tiny")
    (tmp_path / "a.txt").write_text("text")
    for words, message in (
        ([f"data.validation={{a: {tmp_path / 'a.txt'}}}"], "data.validation=.*files have no tokenizer; set data.token"),
        (["logging.sample_tokens=1", "logging.sample_prompt=x"], "logging.sample_prompt=x: .* have no tokenizer"),
    ):
        with one_line(message):
            validate(tiny("data=megatron", f"data.path={prefix}", *words), 1)


def test_a_run_on_megatrons_files_equals_a_run_on_token_files(ranks, tiny, tmp_path):
    """The same documents in both formats give the same losses, with and without attention across documents."""
    own = prepared(tiny("data.validation_fraction=0").data).first
    documents = documents_of(own, "train")
    shared = ["data.validation_fraction=0", f"data.tokenizer={own.directory}", "data=megatron"]
    data = {
        "own": ["data=tokens", f"data.path={own.directory}"],
        "megatron": [*shared, f"data.path={write(tmp_path / 'a', documents, 'int32', sentences=2)}"],
        "no-ends": [*shared, f"data.path={write(tmp_path / 'b', [ids[:-1] for ids in documents])}"],
    }
    found = {}
    for name, words in data.items():
        for reset in (False, True):
            run = tiny(f"run.dir={tmp_path}/{name}{reset}", "train.steps=2", f"data.reset_attention={reset}", *words)
            ranks.run(1, train_in_rank, run)
            found[name, reset] = [line["loss"] for line in metric_lines(run.run.dir)]
    assert found["own", False] == found["megatron", False] and len(found["own", False]) == 2
    assert found["own", True] == pytest.approx(found["megatron", True], rel=1e-6)
    assert all(found[name, False] != found[name, True] for name in ("own", "no-ends"))


def test_a_blend_of_prefixes_trains_without_a_tokenizer_and_resumes(ranks, tiny, tmp_path):
    first = write(tmp_path / "a", random_documents(1))
    second = write(tmp_path / "b", random_documents(2), "int32")
    words = [*blend_of({first: 0.3, second: 0.7}), "data.validation_fraction=0.2", "data.reset_attention=true"]
    common = [*words, "train.steps=4", "train.validate_every=2", "checkpoint.every=2"]
    resume = f"checkpoint.resume={tmp_path}/straight/checkpoints/step_00000002"
    found = []
    for name, more in (("straight", ()), ("resumed", (resume,))):
        run = tiny(*common, *more, f"run.dir={tmp_path / name}")
        ranks.run(1, train_in_rank, run)
        found.append(metric_lines(run.run.dir))
    assert [*found[0][-1]["sources"]] == ["a", "b"]
    assert [line["loss"] for line in found[0]][2:] == [line["loss"] for line in found[1]]


def test_a_blend_of_a_prefix_and_a_token_directory_needs_its_tokenizer(ranks, tiny, tmp_path):
    own = prepared(tiny().data).first.directory
    words = [*blend_of({own: 3, write(tmp_path / "a", random_documents()): 1}), "train.steps=1"]
    message = rf"data\.tokenizer=None: not the tokenizer that made {own}, .*set data\.tokenizer={own}"
    with pytest.raises(RankFailure, match=message):
        ranks.run(1, train_in_rank, tiny(*words))
    ranks.run(1, train_in_rank, tiny(*words, f"data.tokenizer={own}", f"run.dir={tmp_path / 'r'}"))


def validation_sets(run):
    """Return the metrics of each set at the last validation of a run, and the loss of the held-out documents."""
    lines = [json.loads(line) for line in (Path(run.run.dir) / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line.get("event") == "validation"][-1]
    return last["sets"], last["loss"]


VALIDATED = ["train.steps=2", "train.batch_size=4", "train.validate_every=2", "train.validation_batches=3"]


@pytest.mark.parametrize("reset", [full("false"), "true"])
def test_a_prefix_is_a_validation_set_with_the_loss_of_token_files(ranks, tiny, tmp_path, reset):
    own = prepared(tiny().data).first.directory
    (tmp_path / "other.txt").write_text("kappa iota theta eta zeta 0123 " * 200)
    (tmp_path / "more.txt").write_text("alpha gamma theta 45 zeta " * 99)
    settings = f"data.path={tmp_path}/*.txt", f"data.tokenizer={own}", "data.validation_fraction=0"
    files = prepared(tiny(*settings).data).first
    prefix = write(tmp_path / "a", documents_of(files, "train"))
    sets = f"data.validation={{tokens: {files.directory}, prefix: {prefix}}}"
    run = tiny("data=tokens", f"data.path={own}", sets, f"data.reset_attention={reset}", *VALIDATED)
    ranks.run(2, train_in_rank, run)
    found, held_out = validation_sets(run)
    assert found["prefix"] == {key: pytest.approx(value, rel=1e-6) for key, value in found["tokens"].items()}
    assert found["prefix"].keys() > {"loss", "bits_per_byte"} and abs(found["prefix"]["loss"] - held_out) > 1e-3
    described = f"validation set prefix: {prefix}, 2 documents of {len(files.tokens('train')):,} tokens"
    assert described in report(validate(run, 1), run, {})


def test_a_prefix_that_a_run_trains_on_is_its_held_out_split(ranks, tiny, tmp_path):
    own = prepared(tiny().data).first.directory
    prefix, copy, other = (
        write(tmp_path / name, random_documents(seed, end=())) for name, seed in (("a", 1), ("copy", 1), ("b", 2))
    )
    words = ["data=megatron", f"data.path={prefix}", f"data.tokenizer={own}", "data.validation_fraction=0.4"]
    run = tiny(*words, f"data.validation={{same: {prefix}, copy: {copy}, other: {other}}}", *VALIDATED)
    ranks.run(1, train_in_rank, run)
    found, held_out = validation_sets(run)
    assert found["same"]["loss"] == found["copy"]["loss"] == held_out != found["other"]["loss"]


def test_a_prefix_that_cannot_be_a_validation_set_is_one_line(ranks, tiny, tmp_path):
    own = prepared(tiny().data).first.directory
    prefix = write(tmp_path / "a", [[1, 2, 70_000]], "int32")
    words = ["data=tokens", f"data.path={own}", f"data.validation={{a: {prefix}}}", *VALIDATED]
    for message in ("the largest token of .*a.bin is 70000; use the", "a.idx: No such file or directory; use a pre"):
        with pytest.raises(RankFailure, match=rf"data\.validation\.a=.*: .*{message}"):
            ranks.run(1, train_in_rank, tiny(*words))
        (tmp_path / "a.idx").unlink(missing_ok=True)


def test_another_split_or_other_tokens_are_other_samples(config, tmp_path):
    prefix = write(tmp_path / "a", random_documents())

    def samples(**changes):
        return prepared(replace(config, path=prefix, **changes)).fingerprint()

    before = samples()
    write(tmp_path / "moved", random_documents())
    assert prepared(replace(config, path=str(tmp_path / "moved"))).fingerprint() == before
    assert samples(validation_fraction=0.1) != before
    write(tmp_path / "a", random_documents(1))
    assert samples() != before


def test_the_index_of_several_modalities_is_read(config, tmp_path):
    prefix = write(tmp_path / "a", random_documents())
    expected = Index.read(prefix).bounds.tolist()
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes() + bytes(60))
    assert Index.read(prefix).bounds.tolist() == expected
