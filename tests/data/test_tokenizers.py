"""Tokenizers: GPT-2's without a network, configured ones without truncation, and texts split without effect."""

import hashlib
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import documents, preparation, prepare, tokenizers, transformers_tokenizer
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.tokens import TokenFiles
from tests.support.data_files import one_line


@pytest.fixture(scope="module")
def gpt2():
    return tokenizers.gpt2()


def test_gpt2s_vocabulary_is_the_published_one(gpt2):
    assert gpt2.encode("Hello world").ids == [15496, 995]
    assert gpt2.get_vocab_size() == 50257 and tokenizers.end_of_text(gpt2) == 50256


TEXTS = st.text(st.sampled_from("ab'1. \n\t\r –é六"), max_size=40)


@settings(deadline=None)
@given(TEXTS, st.integers(0, 5))
def test_splitting_a_text_does_not_change_its_tokens(text, size):
    gpt2, pieces = _cached_gpt2(), tokenizers.split_text(text, size)
    assert "".join(pieces) == text
    ids = [i for piece in pieces for i in gpt2.encode(piece, add_special_tokens=False).ids]
    assert ids == gpt2.encode(text, add_special_tokens=False).ids


def test_lines_and_words_of_any_length_are_cut():
    line, word = "ab cd " * 20_000, "x" * 300_000
    for text in (line, word, " " * 300_000, f"{word} {line}\n{word}\n"):
        pieces = tokenizers.split_text(text)
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 2**16
        words = [part for piece in pieces for part in tokenizers.split_words(piece)]
        assert "".join(words) == text
    assert {piece[0] for piece in tokenizers.split_text(line)[1:]} == {" "}, "a word begins with its space"
    assert set(map(len, tokenizers.split_words(word)[1:-1])) == {500}
    assert tokenizers.split_words("y" * 499 + " " + "z" * 499) == ["y" * 499 + " " + "z" * 499]


@pytest.mark.parametrize("kind", ["x", "六", "-", " ", "\u0301", "_", "1²"])
def test_a_tokenizer_is_trained_on_no_word_of_a_thousand_characters(kind, monkeypatch):
    seen = []
    monkeypatch.setattr(Tokenizer, "train_from_iterator", lambda _, texts, trainer: seen.extend(texts), raising=False)
    tokenizers.train([kind * 5000], 300)
    assert "".join(seen) == kind * 5000 and max(map(len, seen)) < 1000


@cache
def _cached_gpt2():
    """GPT-2's tokenizer for a hypothesis test, which cannot use a fixture."""
    return tokenizers.gpt2()


@pytest.fixture
def changed(gpt2, tmp_path):
    """Return a function that reads GPT-2's tokenizer, by default with few merges, after ``change`` of its content."""

    def read(change, whole=False):
        content = json.loads(gpt2.to_str())
        model = content["model"]
        if not whole:
            model["merges"] = model["merges"][:2000]
            kept = {token: id for token, id in model["vocab"].items() if id < 256 + 2000}
            model["vocab"] = kept | {tokenizers.END_OF_TEXT: 50256}
        change(content)
        (tmp_path / "changed.json").write_text(json.dumps(content))
        return tokenizers.read(tmp_path / "changed.json")

    return read


@pytest.mark.slow
def test_the_name_of_the_end_token_in_a_text_is_encoded_as_text(changed):
    def ordinary(content):
        content["added_tokens"][0]["special"] = False

    for change in (lambda content: None, ordinary, lambda content: content["added_tokens"].clear()):
        tokenizer = changed(change)
        text = "before <|endoftext|> after"
        for long in (text, f"{text}\n" * 2000):
            ids = tokenizers.encode(tokenizer, long)
            assert 50256 not in ids and tokenizer.decode(ids) == long


def test_dropout_of_a_tokenizer_is_disabled(gpt2, changed):
    tokenizer = changed(lambda content: content["model"].update(dropout=0.5), whole=True)
    text = "a text of several words, some of them uncommon"
    assert {tuple(tokenizers.encode(tokenizer, text)) for _ in range(10)} == {tuple(gpt2.encode(text).ids)}


ADDED = {"id": 50257, "content": "<x>", "single_word": False, "normalized": False, "special": False}
ADDED |= {"lstrip": False, "rstrip": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["pre_tokenizer"].update(use_regex=False),
        lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
        lambda content: content["added_tokens"].append({**ADDED, "lstrip": True}),
        lambda content: content["added_tokens"].append({**ADDED, "rstrip": True}),
        lambda content: content["added_tokens"].append({**ADDED, "content": "\nx"}),
        lambda content: content["added_tokens"].append({**ADDED, "content": "a\n"}),
        lambda content: content["added_tokens"].append({**ADDED, "content": "e e"}),
        lambda content: content.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    ],
    ids=["no regex", "prefix space", "strips left", "strips right", "line start", "line end", "space", "normalizer"],
)
def test_a_text_is_not_split_if_that_could_change_its_tokens(changed, change, monkeypatch):
    tokenizer = changed(change)
    monkeypatch.setattr(tokenizers, "PIECE_CHARACTERS", 4)
    text = "a \n\n<x>\nb \nxa\n\n\nxx aa\n<x> \n\nend\nthe end" * 3
    monkeypatch.setattr(tokenizers.split_text, "__defaults__", (4, 100))
    assert tokenizers.encode(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_vocabulary_of_a_tokenizer_that_skips_ids_includes_the_last(changed, small, tmp_path):
    def with_gaps(content):
        content["added_tokens"].append(ADDED)
        for token in ("Ġthe", "Ġa"):
            del content["model"]["vocab"][token]
        content["model"]["vocab"]["<far>"] = 70_000
        content["model"]["merges"] = []

    path = tmp_path / "gaps.json"
    changed(with_gaps, whole=True).save(str(path))
    with pytest.raises(ConfigError, match=r"its 70001 tokens are more than data\.tokenizer_vocab=70000; raise"):
        transformers_tokenizer.from_config(replace(small, tokenizer=str(path), tokenizer_vocab=70_000))
    files = prepare.prepare(replace(small, tokenizer=str(path), tokenizer_vocab=70_001), tmp_path / "out")
    assert files.header["vocabulary"] == 70_001 and files.header["dtype"] == "uint32"
    assert files.tokens("train").dtype == "uint32"
    ids = files.tokens("train")[:]
    assert files.tokenizer().decode(ids[ids != files.end_of_text][:20].tolist()).isascii()


@pytest.mark.full
def test_the_speeches_have_the_known_number_of_gpt2_tokens(gpt2):
    """The speeches joined by empty lines have 2,389,404 tokens, two of them for each of the 248 joints."""
    texts = [document.text for document in documents.documents(DataConfig())]
    assert sum(len(tokenizers.encode(gpt2, text)) for text in texts) + 2 * 248 == 2_389_404


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(small, tmp_path, monkeypatch):
    trained = prepared(small).first
    tokenizer = trained.tokenizer()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "short.json"))
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 2000)
    for processes in (1, 2):
        changes = {"tokenizer": str(tmp_path / "short.json"), "processes": processes}
        files = prepare.prepare(replace(small, **changes), tmp_path / f"by{processes}")
        assert files.tokens("train")[:].tolist() == trained.tokens("train")[:].tolist()
        assert files.fingerprint() == hashlib.sha256((tmp_path / "short.json").read_bytes()).hexdigest()


def test_equal_tokenizers_with_different_bytes_do_not_share_a_cache(small, tmp_path):
    """Runs identify a tokenizer by its bytes."""
    text, path = prepared(small).first.tokenizer().to_str(), tmp_path / "a.json"
    for content in (text, text + "\n"):
        path.write_text(content)
        files = prepared(replace(small, tokenizer=str(path))).first
        assert files.fingerprint() == hashlib.sha256(content.encode()).hexdigest()


@pytest.mark.slow
def test_a_transformers_tokenizer_is_read_from_its_directory(small, tmp_path):
    from transformers import PreTrainedTokenizerFast

    trained = prepared(small).first
    saved = PreTrainedTokenizerFast(tokenizer_object=trained.tokenizer(), eos_token="<|endoftext|>")
    saved.save_pretrained(tmp_path / "saved")
    files = prepared(replace(small, tokenizer=str(tmp_path / "saved"))).first
    assert files.tokens("validation")[:].tolist() == trained.tokens("validation")[:].tolist()


def test_an_unusable_tokenizer_is_rejected(small, tmp_path):
    text = prepared(small).first.tokenizer().to_str()
    for content, message in (
        ("{}", "not a usable tokenizer"),
        (text.replace("<|endoftext|>", "<|other|>"), "has no end-of-text token"),
        (text, r"its \d+ tokens are more than data.tokenizer_vocab=258; raise"),
    ):
        (tmp_path / "t.json").write_text(content)
        with one_line(message):
            prepared(replace(small, tokenizer=str(tmp_path / "t.json"), tokenizer_vocab=258))


def test_documents_end_with_the_eos_token_that_the_tokenizer_names(changed, small, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tokenizer = changed(lambda content: None, whole=True)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(source / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<end>"}
    settings = {"eos_token": end, "pad_token": "<end>", "chat_template": "{{ messages }}"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    small = replace(small, tokenizer=str(source), tokenizer_vocab=60_000)
    files = prepare.prepare(small, tmp_path / "out")
    assert files.end_of_text == 50257 == files.tokens("train")[-1:].item()
    assert files.tokenizer().encode("<end>", add_special_tokens=False).ids != [50257], "a text cannot end itself"
    companions = tokenizers.companions(files.directory)
    assert companions == tokenizers.companions(source) and tokenizers.special_tokens(companions)["pad_token"] == "<end>"
    assert TokenFiles.open(files.directory) == files
    (files.directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<other>"}))
    with pytest.raises(ConfigError, match=r"the tokenizer lacks the eos_token='<other>' of tokenizer_config\.json"):
        TokenFiles.open(files.directory)


def test_code_of_a_tokenizers_repository_never_runs_and_nobody_is_asked(small, tmp_path, monkeypatch):
    repository, ran = tmp_path / "repository", tmp_path / "ran"
    repository.mkdir()
    auto_map = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Own", None]}
    (repository / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (repository / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
    (repository / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="it needs Python code from its repository, which gpt4d never runs"):
        transformers_tokenizer.from_config(replace(small, tokenizer=str(repository)))
    assert not ran.exists()
