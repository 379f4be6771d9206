"""The UTF-8 bytes that the tokens of a vocabulary encode, for losses in bits per byte."""

import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def bytes_of_tokens(tokenizer: Tokenizer, end_of_text: int) -> np.ndarray:
    """Return the number of UTF-8 bytes that each token id adds to a decoded text, int64 [vocabulary].

    Special tokens and the end-of-text token add none. So the counts of the tokens of a text sum to its length in bytes,
    as the tokenizer decodes it, wherever the text is cut into sequences: a token of a byte-level vocabulary counts its
    bytes, even if it ends within a character. Vocabularies of words count a token's text after another token, with the
    space before a word.
    """
    ids = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder()
    counts = np.zeros(max(ids.values()) + 1, np.int64)
    count = _count_of(tokenizer, [token_id for token_id in ids.values() if token_id not in added])
    for token, token_id in ids.items():
        if token_id not in added:
            counts[token_id] = count(token, token_id)
        elif not added[token_id].special:
            counts[token_id] = len(token.encode())
    counts[end_of_text] = 0
    return counts


def _count_of(tokenizer: Tokenizer, ids: list[int]) -> Any:
    """Return a function from a token and its id to its number of bytes. ``ids``: the ids of ordinary tokens."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return lambda token, token_id: len(token)  # one character stands for each byte

    first = ids[0]
    before = len(tokenizer.decode([first], skip_special_tokens=False).encode())

    def count(token: str, token_id: int) -> int:
        if _BYTE.fullmatch(token):
            return 1
        return len(tokenizer.decode([first, token_id], skip_special_tokens=False).encode()) - before

    return count
