"""Bytes of tokens: their sum over a text is the length of the text in UTF-8, wherever the text is cut."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gpt4d.data import tokenizers
from gpt4d.data.tokenizers import bytes_of_tokens

TEXT = "My fellow citizens, über Straße 東京 \U0001f600 naïve"


@pytest.fixture(scope="module")
def byte_level():
    tokenizer = tokenizers.train([TEXT] * 3, 290)
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.add_tokens(["<tool>ü"])
    return tokenizer


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_bytes_of_byte_level_tokens_sum_to_the_text(byte_level, text):
    counts = bytes_of_tokens(byte_level, byte_level.token_to_id(tokenizers.END_OF_TEXT))
    assert counts[tokenizers.encode(byte_level, text)].sum() == len(text.encode())


def test_special_tokens_and_the_end_of_text_have_no_bytes(byte_level):
    end = byte_level.token_to_id(tokenizers.END_OF_TEXT)
    counts = bytes_of_tokens(byte_level, end)
    assert counts[end] == counts[byte_level.token_to_id("<|im_start|>")] == 0
    assert counts[byte_level.token_to_id("<tool>ü")] == len("<tool>ü".encode())
    assert len(counts) == tokenizers.vocabulary(byte_level) and counts.dtype == np.int64
    assert bytes_of_tokens(byte_level, byte_level.token_to_id("a"))[byte_level.token_to_id("a")] == 0


def test_tokens_with_bytes_as_a_fallback_sum_to_the_text_with_a_space_before_each_word():
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "cat", "ü", "▁so", "s"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    counts = bytes_of_tokens(tokenizer, vocabulary["</s>"])
    tokens = ["▁the", "cat", "s", "▁so", "ü", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁", "</s>", "<unk>"]
    assert counts[[vocabulary[token] for token in tokens]].tolist() == [4, 3, 1, 3, 2, 1, 1, 1, 1, 1, 0, 0]
    ids = [vocabulary[token] for token in tokens[:-2]]
    assert counts[ids].sum() == len(tokenizer.decode(ids).encode()) + 1  # the first space, which the decoder strips


def test_tokens_of_a_vocabulary_of_words_have_the_space_before_a_word():
    vocabulary = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "fun": 4, "ü": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    counts = bytes_of_tokens(tokenizer, 1)
    assert counts.tolist() == [0, 0, len(" play"), len("ing"), len(" fun"), len(" ü".encode())]
    assert json.loads(tokenizer.to_str())["model"]["vocab"] == vocabulary
