"""Splitting of long texts, because a tokenizer takes too much time and memory for millions of characters."""

import itertools
import re

PIECE_CHARACTERS = 1 << 14
_LONGEST = 4 * PIECE_CHARACTERS
_LONGEST_WORD = 1000
_LINE = re.compile(r"\n(?=\S)")
_SPACE = re.compile(r"(?<=\S) ")
# Characters of one kind. No word of byte-level BPE has characters of two kinds, except for one space before it.
_RUN = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s+")


def split_text(text: str, size: int = PIECE_CHARACTERS, longest: int = _LONGEST) -> list[str]:
    """Split a text where no token of byte-level BPE can cross: before a newline or a space next to visible characters.

    Every piece but the last has at least ``size`` characters, since the overhead of short pieces exceeds their benefit.
    A text of ``longest`` characters without such a position is cut at that length, which may change its tokens.
    """
    cuts, end = [0], 0
    while end < len(text):
        first, end = cuts[-1] + max(1, size), cuts[-1] + longest
        if match := _LINE.search(text, first, end) or _SPACE.search(text, first, end):
            end = match.start()
        if end < len(text):
            cuts.append(end)
    return _pieces(text, cuts)


def split_words(text: str, longest: int = _LONGEST_WORD) -> list[str]:
    """Split words of ``longest`` characters or more, since the time to train BPE grows with the square of a word.

    Cuts are in the middle of runs of ``longest`` / 2 characters of one kind, so shorter words are never cut.
    """
    half, quarter = longest // 2, longest // 4
    places = range(half, len(text) - quarter + 1, half)
    return _pieces(text, [0, *(place for place in places if _RUN.fullmatch(text, place - quarter, place + quarter))])


def _pieces(text: str, cuts: list[int]) -> list[str]:
    return [text[start:stop] for start, stop in itertools.pairwise([*cuts, len(text)])]
