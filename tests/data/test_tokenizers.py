"""Tokenizers: GPT-2's own without a network, given ones used whole, and pieces that change no token."""

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import documents, encoding, prepare, tokenizers
from tests.data import words


@pytest.fixture(scope="module")
def gpt2():
    return tokenizers.gpt2()


def test_gpt2s_vocabulary_is_its_own(gpt2):
    assert gpt2.encode("Hello world").ids == [15496, 995]
    assert gpt2.get_vocab_size() == 50257 and tokenizers.end_of_text(gpt2) == 50256


@pytest.fixture
def config(corpus, tmp_path):
    return words(corpus, tmp_path)


TEXTS = st.text(st.sampled_from("ab'1. \n\t\r –é六"), max_size=40)


@settings(deadline=None)
@given(TEXTS, st.integers(0, 5))
def test_cut_into_pieces_a_text_has_the_same_tokens(text, size):
    gpt2, cut = _cached_gpt2(), tokenizers.pieces(text, size)
    assert "".join(cut) == text
    ids = [i for piece in cut for i in gpt2.encode(piece, add_special_tokens=False).ids]
    assert ids == gpt2.encode(text, add_special_tokens=False).ids


def _cached_gpt2(made=[]):  # noqa: B006 – hypothesis cannot take a fixture
    if not made:
        made.append(tokenizers.gpt2())
    return made[0]


def changed(gpt2, change):
    """GPT-2's tokenizer as ``read`` has it from a file, after ``change`` of what the file says."""
    content = json.loads(gpt2.to_str())
    change(content)
    return tokenizers._whole(Tokenizer.from_str(json.dumps(content)))


def test_the_end_of_text_in_a_text_is_text(gpt2):
    def ordinary(content):
        content["added_tokens"][0]["special"] = False

    for change in (lambda content: None, ordinary, lambda content: content["added_tokens"].clear()):
        tokenizer = changed(gpt2, change)
        text = "before <|endoftext|> after"
        for long in (text, f"{text}\n" * 2000):
            ids = tokenizers.encode(tokenizer, long)
            assert 50256 not in ids and tokenizer.decode(ids) == long


def test_a_tokenizer_with_dropout_gives_the_same_tokens_each_time(gpt2):
    tokenizer = changed(gpt2, lambda content: content["model"].update(dropout=0.5))
    text = "a text of several words, some of them uncommon"
    assert {tuple(tokenizers.encode(tokenizer, text)) for _ in range(10)} == {tuple(gpt2.encode(text).ids)}


ACROSS = {"id": 50257, "content": "<x>", "single_word": False, "normalized": False, "special": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["pre_tokenizer"].update(use_regex=False),
        lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
        lambda content: content["added_tokens"].append({**ACROSS, "lstrip": True, "rstrip": False}),
        lambda content: content["added_tokens"].append({**ACROSS, "lstrip": False, "rstrip": True}),
        lambda content: content["added_tokens"].append({**ACROSS, "content": "\nx", "lstrip": False, "rstrip": False}),
        lambda content: content["added_tokens"].append({**ACROSS, "content": "a\n", "lstrip": False, "rstrip": False}),
        lambda content: content.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    ],
    ids=["no words", "space before", "takes left", "takes right", "line's beginning", "line's end", "normalized"],
)
def test_no_text_is_cut_where_that_changes_its_tokens(gpt2, change, monkeypatch):
    tokenizer = changed(gpt2, change)
    monkeypatch.setattr(tokenizers, "_PIECE", 4)
    text = "a \n\n<x>\nb \nxa\n\n\nxx aa\n<x> \n\nend\nthe end" * 3
    monkeypatch.setattr(tokenizers.pieces, "__defaults__", (4,))
    assert tokenizers.encode(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_that_leaves_ids_out_needs_a_vocabulary_up_to_the_last(gpt2, config, tmp_path):
    def with_gaps(content):
        content["added_tokens"].append({**ACROSS, "id": 50257, "content": "<x>", "lstrip": False, "rstrip": False})
        for token in ("Ġthe", "Ġa"):
            del content["model"]["vocab"][token]
        content["model"]["vocab"]["<far>"] = 70_000
        content["model"]["merges"] = []

    path = tmp_path / "gaps.json"
    changed(gpt2, with_gaps).save(str(path))
    with pytest.raises(ConfigError, match=r"its 70001 tokens are more than data\.tokenizer_vocab=70000; raise"):
        tokenizers.given(replace(config, tokenizer=str(path), tokenizer_vocab=70_000))
    files = prepare.prepare(replace(config, tokenizer=str(path), tokenizer_vocab=70_001), tmp_path / "out")
    assert files.header["vocabulary"] == 70_001 and files.header["dtype"] == "uint32"
    assert files.tokens("train").dtype == "uint32"
    ids = files.tokens("train")[:]
    assert files.tokenizer().decode(ids[ids != files.end_of_text][:20].tolist()).isascii()


def test_real_text_with_gpt2s_vocabulary_has_the_tokens_known_of_it(gpt2):
    """2,389,404 is what is known of the speeches joined by empty lines: each of the 248 joints is two tokens."""
    texts = [document.text for document in documents.documents(DataConfig())]
    assert sum(len(tokenizers.encode(gpt2, text)) for text in texts) + 2 * 248 == 2_389_404


def test_a_given_tokenizer_is_used_whole(config, tmp_path, monkeypatch):
    """Whatever its file says of truncating and padding, which is about batches of short texts."""
    trained = prepare.corpus(config).first
    tokenizer = trained.tokenizer()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "short.json"))
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 2000)
    for processes in (1, 2):
        words = {"tokenizer": str(tmp_path / "short.json"), "processes": processes}
        given_files = prepare.prepare(replace(config, **words), tmp_path / f"by{processes}")
        assert given_files.tokens("train")[:].tolist() == trained.tokens("train")[:].tolist()
        assert given_files.fingerprint() == hashlib.sha256((tmp_path / "short.json").read_bytes()).hexdigest()


def test_equal_tokenizers_of_other_bytes_do_not_share_a_cache(config, tmp_path):
    """Runs tell tokenizers apart by their bytes."""
    text = prepare.corpus(config).first.tokenizer().to_str()
    for name, content in (("a.json", text), ("b.json", text + "\n")):
        (tmp_path / name).write_text(content)
        files = prepare.corpus(replace(config, tokenizer=str(tmp_path / name))).first
        assert files.fingerprint() == hashlib.sha256(content.encode()).hexdigest()


def test_one_of_transformers_is_taken_from_its_directory(config, tmp_path):
    from transformers import PreTrainedTokenizerFast

    trained = prepare.corpus(config).first
    theirs = PreTrainedTokenizerFast(tokenizer_object=trained.tokenizer(), eos_token="<|endoftext|>")
    theirs.save_pretrained(tmp_path / "theirs")
    files = prepare.corpus(replace(config, tokenizer=str(tmp_path / "theirs"))).first
    assert files.tokens("validation")[:].tolist() == trained.tokens("validation")[:].tolist()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "not a tokenizer that can be used"),
        ("no end", "has no token to end a document with"),
        (None, r"its \d+ tokens are more than data.tokenizer_vocab=258; raise"),
    ],
)
def test_a_tokenizer_that_will_not_do_is_refused(config, tmp_path, content, said):
    text = prepare.corpus(config).first.tokenizer().to_str()
    if content == "no end":
        content = json.dumps(json.loads(text.replace("<|endoftext|>", "<|other|>")))
    (tmp_path / "t.json").write_text(content or text)
    with pytest.raises(ConfigError, match=said):
        prepare.corpus(replace(config, tokenizer=str(tmp_path / "t.json"), tokenizer_vocab=258))
