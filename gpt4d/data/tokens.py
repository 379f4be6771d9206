"""A corpus as token files: a BPE tokenizer trained on it, and the encoded training and validation splits, cached."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt4d.config import ConfigError, DataConfig, tokenizer_file
from gpt4d.data import corpus

END_OF_TEXT = "<|endoftext|>"
_FORMAT = 1  # part of the cache's name: change it when the files would come out differently


@dataclass(frozen=True)
class TokenFiles:
    """A directory with ``tokenizer.json``, ``train.bin`` and ``validation.bin`` (uint16 or uint32)."""

    directory: Path

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def fingerprint(self) -> str:
        """Of the tokenizer: two with the same give the same ids."""
        return hashlib.sha256((self.directory / "tokenizer.json").read_bytes()).hexdigest()

    def tokens(self, split: str) -> np.memmap:
        header = json.loads((self.directory / "header.json").read_text())
        if not header["tokens"][split]:
            return np.empty(0, header["dtype"])
        return np.memmap(self.directory / f"{split}.bin", dtype=header["dtype"], mode="r")


def prepare(config: DataConfig) -> TokenFiles:
    """The token files of a corpus, made now unless they are in the cache.

    ConfigError if there is no text to train on. A directory appears in the cache only once it is whole.
    """
    texts = list(corpus.documents(corpus.files(config)))
    training = [text for text in texts if not corpus.held_out(text, config.validation_fraction)]
    validation = [text for text in texts if corpus.held_out(text, config.validation_fraction)]
    if not training:
        where = f"data.source={config.source}, data.path={config.path!r}"
        mend = "; set data.validation_fraction=0, all of it is held out" if validation else ""
        raise ConfigError(f"{where}: there is no text to train on{mend}")
    tokenizer = _given(config) if config.tokenizer else None
    kind = config.tokenizer_vocab if tokenizer is None else tokenizer_file(config.tokenizer).read_bytes()
    fingerprint = hashlib.sha256(repr((_FORMAT, kind, config.validation_fraction)).encode())
    for text in texts:
        fingerprint.update(hashlib.sha256(text.encode()).digest())
    directory = Path(config.cache_dir) / f"{config.name}-{fingerprint.hexdigest()[:16]}"
    if not directory.exists():
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.cache_dir={config.cache_dir}: {error.strerror}; choose another") from None
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as temporary:
            making = Path(temporary) / directory.name
            making.mkdir()
            if tokenizer is None:
                tokenizer = _train_bpe(training, config.tokenizer_vocab)
                tokenizer.save(str(making / "tokenizer.json"))
            else:
                shutil.copy(tokenizer_file(config.tokenizer), making / "tokenizer.json")
            _write(making, training, validation, tokenizer)
            try:
                os.replace(making, directory)
            except OSError:  # another job was quicker; its files are the same
                if not directory.exists():
                    raise
    return TokenFiles(directory)


def _given(config: DataConfig) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``. ConfigError if it is none, or none for the model."""
    path = tokenizer_file(config.tokenizer)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no kind of its own
        raise ConfigError(f"data.tokenizer={config.tokenizer}: not a tokenizer.json ({error})") from None
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ConfigError(f"data.tokenizer={config.tokenizer}: it has no token {END_OF_TEXT} to end a document with")
    if tokenizer.get_vocab_size() > config.tokenizer_vocab:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: its {tokenizer.get_vocab_size()} tokens are more than "
            f"model.vocab_size={config.tokenizer_vocab}; raise that"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _write(directory: Path, training: list[str], validation: list[str], tokenizer: Tokenizer) -> None:
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    end = tokenizer.token_to_id(END_OF_TEXT)
    counts = {}
    for split, texts in (("train", training), ("validation", validation)):
        counts[split] = 0
        with open(directory / f"{split}.bin", "wb") as file:
            for text in texts:
                # Paragraph by paragraph: one long string takes the tokenizer many times as long.
                paragraphs = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
                ids = [i for paragraph in paragraphs for i in paragraph.ids] + [end]
                np.asarray(ids, dtype).tofile(file)
                counts[split] += len(ids)
    (directory / "header.json").write_text(json.dumps({"dtype": dtype, "tokens": counts}) + "\n")


def _train_bpe(texts: list[str], vocabulary: int) -> Tokenizer:
    """GPT-2's kind of tokenizer: byte-level BPE, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer
