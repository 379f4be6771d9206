"""Preparation of token files from text, one part at a time, so that it can be resumed."""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from tokenizers import Tokenizer

from gpt4d.config import HEADER, ConfigError, DataConfig
from gpt4d.data import (
    chat_template,
    conversations,
    documents,
    encoding,
    parts,
    tokenizers,
    tokens,
    transformers_tokenizer,
)
from gpt4d.data.conversations import Unread
from gpt4d.data.documents import Document
from gpt4d.data.encoding import Encoded, Encoding
from gpt4d.data.tokens import TokenFiles
from gpt4d.runtime.files import counts, sync, write_file
from gpt4d.runtime.writing import warn

PROGRESS = "progress.json"
PART_TOKENS = 1 << 26  # training tokens per part, the maximum that an interruption loses
REPORT_INTERVAL_S = 2.0


def identity_of(config: DataConfig) -> str:
    """Return a hash of the corpus, the settings and all other inputs of the token files."""
    files = tokenizers.from_config(config) if config.tokenizer else {}
    tokenizer = sorted(files.items()) if files else config.tokenizer_vocab
    facts: tuple = (tokens.FORMAT, documents.identity(config), tokenizer, config.validation_fraction)
    if config.source == "chat":
        facts += (config.train_on, conversations.READ)
    elif files and (first := _first_tokens(config, files)):
        facts += (first,)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _first_tokens(config: DataConfig, files: Mapping[str, bytes]) -> list[int]:
    """Return the ids that each document begins with; none for conversations, whose template renders them."""
    if config.source == "chat":
        return []
    tokenizer = tokenizers.parse(files, config.tokenizer)
    return tokenizers.chosen_first_tokens(config.begin_of_text, tokenizer, files)


class Preparation:
    """Writer of a directory of token files, in the order of the documents.

    ``progress.json`` describes the finished parts; a new preparation of the same corpus continues after them.
    With ``held_out``, only held-out documents are written, until they have this number of tokens.
    """

    def __init__(
        self,
        config: DataConfig,
        identity: str,
        directory: Path,
        on_progress: Callable[[str], None],
        held_out: int | None = None,
    ):
        self.config, self.identity, self.directory, self.on_progress = config, identity, directory, on_progress
        self.held_out = held_out
        self.tokenizer_file = directory / tokenizers.FILE
        self.parts: list[dict] = []
        self.documents_done = 0  # in finished parts
        self.unknown = 0  # characters and words of finished parts that are not in the vocabulary
        self.masked = config.source == "chat"
        tokenizer = self._resume() or self._start()
        self.vocabulary = tokenizers.vocabulary(tokenizer)
        self.files = tokenizers.with_companions(self.tokenizer_file)
        self.end = tokenizers.end_of_text(tokenizer, self.files)
        self.dtype = parts.dtype_for(self.vocabulary)
        self.first = _first_tokens(config, self.files)

    def run(self) -> None:
        """Write the remaining parts and the header. Raises ConfigError if there is no text to train on."""
        train_on = self.config.train_on if self.masked else None
        fraction = self.config.validation_fraction
        settings = Encoding(self.tokenizer_file, self.end, self.dtype, fraction, train_on, self.first)
        pace, unread = _Pace(documents.size(self.config)), Unread()
        read = documents.documents(self.config, unread)
        if self.held_out is not None:
            read = (d for d in read if documents.is_held_out(d.text, self.config.validation_fraction))
        remaining = pace.track(itertools.islice(read, self.documents_done, None))
        with closing(encoding.encode_documents(remaining, settings, self.config.processes)) as encoded:
            while self._write_part(encoded, pace):
                self._save_progress()
        if self.held_out == 0:  # a stream without held-out documents, which has read no row
            next(documents.documents(self.config, unread), None)
        tokenizer = transformers_tokenizer.load(self.files, self.directory) if self.masked else None
        template = tokenizer and chat_template.all_templates(tokenizer)
        for keys in conversations.unread_keys(unread, template, self.config.train_on):
            warn(f"data={self.config.name}: {keys}")
        if self.held_out is None and not sum(part["train"]["tokens"] for part in self.parts):
            source = f"data.source={self.config.source}, data.path={self.config.path!r}"
            if self.parts:
                raise ConfigError(f"{source}: every document is held out; set data.validation_fraction=0")
            raise ConfigError(f"{source}: there is no text to train on; add documents")
        header = {
            "format": tokens.FORMAT,
            "identity": self.identity,
            "dtype": self.dtype,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "vocabulary": self.vocabulary,
            "end_of_text": self.end,
            **({"masked": True} if self.masked else {}),
            **({tokenizers.BEGIN: self.first} if self.first else {}),
            **({"unknown": self.unknown} if self.unknown else {}),
            "parts": self.parts,
        }
        write_file(self.directory / HEADER, json.dumps(header, indent=1).encode())
        sync(self.directory)

    def _write_part(self, encoded: Iterator[Encoded], pace: "_Pace") -> bool:
        """Write one part and return True; or return False if no document is left."""
        if self.held_out is not None and self.held_out <= sum(part["validation"]["tokens"] for part in self.parts):
            return False
        limits = {"train": PART_TOKENS, "validation": self.held_out or math.inf}
        writer = parts.TokenShardWriter(self.directory, len(self.parts), self.masked)
        with writer:
            for held_out, ids, mask, unknown in encoded:
                self.unknown += unknown
                writer.add("validation" if held_out else "train", ids, mask)
                if pace.report_due():
                    all_parts = (*self.parts, writer.counts)
                    count = sum(part[split]["tokens"] for part in all_parts for split in parts.SPLITS)
                    total = self.documents_done + writer.documents
                    self.on_progress(f"{total:,} documents, {count:,} tokens{pace}")
                if any(writer.counts[split]["tokens"] >= limit for split, limit in limits.items()):
                    break
        if not writer.documents:
            writer.remove()
            return False
        self.parts.append(writer.to_dict())
        self.documents_done += writer.documents
        return True

    def _resume(self) -> Tokenizer | None:
        """Return the tokenizer of an interrupted preparation; None if no preparation can be resumed."""
        path = self.directory / PROGRESS
        if not path.exists():
            return None
        try:
            tokenizer = self._load_progress(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.on_progress(f"starting over: the interrupted preparation is damaged or of another corpus ({error})")
            return None
        kept = {name for part in self.parts for name in part["files"]} | {PROGRESS, self.tokenizer_file.name}
        kept |= tokenizers.companions(self.directory).keys()
        for path in self.directory.iterdir():
            if path.name not in kept:
                path.unlink()  # belongs to the interrupted part
        if self.documents_done:
            self.on_progress(f"resuming after {self.documents_done:,} documents")
        return tokenizer

    def _load_progress(self, progress: dict) -> Tokenizer:
        """Adopt the finished parts and return the tokenizer. Invalid JSON content may raise any of the errors above."""
        if progress["identity"] != self.identity:
            raise ValueError("another corpus or other settings")
        if TokenFiles(self.directory).fingerprint() != progress["tokenizer"]:
            raise ValueError("another tokenizer.json")
        tokenizer = tokenizers.read(self.tokenizer_file)
        dtype = parts.dtype_for(tokenizers.vocabulary(tokenizer))
        finished = parts.parse_parts(progress["parts"], dtype, self.masked)
        count = sum(part[split]["documents"] for part in finished for split in parts.SPLITS)
        if progress["documents"] != count:
            raise ValueError(f"{progress['documents']} documents, but its parts have {count}")
        parts.check_sizes(self.directory, finished)
        parts.check_content(parts.entries(self.directory, finished))
        (self.unknown,) = counts([progress.get("unknown", 0)])
        self.parts, self.documents_done = finished, count
        return tokenizer

    def _start(self) -> Tokenizer:
        for path in self.directory.iterdir():
            path.unlink()
        if self.config.tokenizer:
            files = tokenizers.from_config(self.config)
        else:
            files = {tokenizers.FILE: self._train_tokenizer().to_str().encode()}
        if self.masked and not transformers_tokenizer.load(files, self.config.tokenizer).chat_template:
            raise ConfigError(
                f"data.tokenizer={self.config.tokenizer}: it has no chat template; set data.chat_template to a file "
                "with the Jinja template of the conversations"
            )
        for name, content in files.items():
            write_file(self.directory / name, content)
        self._save_progress()
        return tokenizers.read(self.tokenizer_file)

    def _train_tokenizer(self) -> Tokenizer:
        vocabulary, fraction = self.config.tokenizer_vocab, self.config.validation_fraction
        assert vocabulary is not None, "language models have a vocabulary"
        self.on_progress(f"training a tokenizer of {vocabulary:,} tokens")
        texts = (d.text for d in documents.documents(self.config) if not documents.is_held_out(d.text, fraction))
        return tokenizers.train(texts, vocabulary)

    def _save_progress(self) -> None:
        progress = {
            "identity": self.identity,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "documents": self.documents_done,
            "unknown": self.unknown,
            "parts": self.parts,
        }
        new = self.directory / (PROGRESS + ".new")
        new.unlink(missing_ok=True)
        write_file(new, json.dumps(progress).encode())
        os.replace(new, self.directory / PROGRESS)
        sync(self.directory)


class _Pace:
    """Fraction of the corpus that is read, and the time left; ``size`` is in bytes, or None if it is not known."""

    def __init__(self, size: int | None):
        self.size, self.read = size, 0
        self.read_before: int | None = None
        self.started = time.monotonic()
        self.next_report = self.started + REPORT_INTERVAL_S

    def track(self, remaining: Iterable[Document]) -> Iterator[Document]:
        for document in remaining:
            if self.read_before is None:  # the speed does not include the bytes of resumed parts
                self.read_before, self.started = document.bytes_read, time.monotonic()
            self.read = document.bytes_read
            yield document

    def report_due(self) -> bool:
        """Return True once per report interval."""
        if time.monotonic() < self.next_report:
            return False
        self.next_report += REPORT_INTERVAL_S
        return True

    def __str__(self) -> str:
        if not self.size or self.read_before is None or self.read <= self.read_before:
            return ""
        left = (time.monotonic() - self.started) * (self.size - self.read) / (self.read - self.read_before)
        return f", {self.read / self.size:.0%} read, {timedelta(seconds=round(left))} left"
