"""Preparation of token files from text by one or many processes, one part at a time, so that it can be resumed."""

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import HEADER, ConfigError, DataConfig
from gpt4d.data import chat_template, conversations, documents, tokenizers, tokens, transformers_tokenizer
from gpt4d.data.chat_template import ChatEncoder
from gpt4d.data.conversations import Conversation, Unread
from gpt4d.data.directory import SPLITS, ReportTimer, clear, write_once
from gpt4d.data.documents import Document, is_held_out
from gpt4d.data.tokens import PartWriter, TokenFiles
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import counts, replace_file, sync, write_file
from gpt4d.runtime.machine import usable_cores
from gpt4d.runtime.parent import end_with_parent

PROGRESS = "progress.json"
PART_TOKENS = 1 << 26  # training tokens per part, the maximum that an interruption loses
BATCH_CHARACTERS = 1 << 18  # characters that one task encodes
Encode = Callable[[Document], "Encoded"]
_process_state: Encode  # set in each encoding process


class Encoded(NamedTuple):
    """The tokens of a document."""

    held_out: bool  # whether the document is in the validation split
    ids: np.ndarray  # in the dtype of the files; a text has the first tokens before it, and ends with end-of-text
    mask: np.ndarray | None = None  # uint8, 1 for tokens of a conversation with a loss; None for a text
    unknown: int = 0  # number of its characters and words that are not in the vocabulary


class Encoding(NamedTuple):
    """Settings of an encoding process."""

    tokenizer: Path
    end: int  # end-of-text id, appended to every text
    dtype: str
    fraction: float  # fraction of documents that is held out for validation
    train_on: str | None = None  # messages of conversations that have a loss; None: the documents are texts
    first: Sequence[int] = ()  # ids that every text begins with

    def encoder(self) -> Encode:
        """Return the function that encodes a document."""
        if self.train_on is None:
            return self._text_encoder()
        chat = ChatEncoder(tokenizers.with_companions(self.tokenizer), self.tokenizer.parent, self.train_on)

        def encode(document: Document) -> Encoded:
            ids, mask, unknown = chat.encode(Conversation.from_text(document.text), document.location)
            held_out = is_held_out(document.text, self.fraction)
            return Encoded(held_out, np.array(ids, self.dtype), mask.astype(np.uint8), unknown)

        return encode

    def _text_encoder(self) -> Encode:
        tokenizer = tokenizers.read(self.tokenizer)
        count = tokenizers.unknown_counter(tokenizer)

        def encode(document: Document) -> Encoded:
            problem = f"{document.location}: the tokenizer cannot encode the text (%s); use another data.tokenizer"
            with tokenizers.library_errors(problem):
                ids = tokenizers.encode(tokenizer, document.text)
                unknown = count(document.text, ids)
                if unknown and not ids:
                    raise ValueError("none of its characters is in the vocabulary")
            tokens = np.array([*self.first, *ids, self.end], self.dtype)
            return Encoded(is_held_out(document.text, self.fraction), tokens, unknown=unknown)

        return encode


def encode_documents(documents: Iterable[Document], encoding: Encoding, processes: int | None) -> Generator[Encoded]:
    """Yield the encoded documents in order, by default with one process per core.

    Raises ConfigError if a process is killed.
    """
    processes = processes or usable_cores()
    batches = _batches(documents)
    first = list(itertools.islice(batches, 2))
    if processes == 1 or len(first) < 2:  # one batch is not worth starting a process
        encode = encoding.encoder()
        for batch in itertools.chain(first, batches):
            yield from map(encode, batch)
        return
    # If this process is killed, multiprocessing's tracker removes the pool's semaphores. It inherits the options of
    # warnings and need not report that.
    sys.warnoptions.append("ignore:resource_tracker")
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_process, (encoding,))
    sys.warnoptions.pop()
    try:
        pending: deque = deque()  # bounded, since a corpus may be larger than memory
        for batch in itertools.chain(first, batches):
            with _blocked_ctrl_c():
                pending.append(pool.submit(_encode_in_process, batch))  # starts a process if all are busy
            if len(pending) > 2 * processes:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(
            f"data.processes={processes}: an encoding process was killed (out of memory?); use fewer processes; "
            "the next start resumes the preparation"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about ``BATCH_CHARACTERS``."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _blocked_ctrl_c() -> Iterator[None]:
    """Block SIGINT in processes that the body starts: Ctrl-C reaches them too, but the parent ends its children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_process(encoding: Encoding) -> None:
    global _process_state
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.sentinel)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
    _process_state = encoding.encoder()


def _encode_in_process(batch: list[Document]) -> list[Encoded]:
    return [_process_state(document) for document in batch]


def identity_of(config: DataConfig) -> str:
    """Return a hash of the corpus, the settings and all other inputs of the token files."""
    files = transformers_tokenizer.from_config(config) if config.tokenizer else {}
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


def prepare(
    config: DataConfig,
    out: Path,
    on_progress: Callable[[str], None] = lambda text: None,
    identity: str | None = None,
    held_out: int | None = None,
) -> TokenFiles:
    """Return the token files of a corpus in ``out``, and prepare them unless they exist.

    ``on_progress`` is called periodically with a line of text. ``identity`` defaults to the result of ``identity_of``.
    With ``held_out``, the files contain only held-out documents, until they have this number of tokens.
    The files are written to ``out``.partial, from which an interrupted preparation resumes. The directory is renamed
    to ``out`` once it is complete. Raises ConfigError if there is no text to train on, or if ``out`` contains other
    files.
    """
    identity = identity or identity_of(config)
    created = write_once(
        out, lambda partial: Preparation(config, identity, partial, on_progress, held_out).run(), on_progress
    )
    if created:
        (out / PROGRESS).unlink()  # a preparation without this file starts over, so it is removed last
    elif not (out / HEADER).exists():
        raise ConfigError(f"out={out}: exists and has no token files; choose another directory, or remove it")
    files = TokenFiles.open(out)
    if files.header["identity"] != identity:
        raise ConfigError(
            f"out={out}: has the tokens of another corpus or other settings; choose another directory, or remove it"
        )
    return files


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
        self.parts: list[dict] = []  # entries of the finished parts in the header
        self.unknown = 0  # characters and words of finished parts that are not in the vocabulary
        self.masked = config.source == "chat"
        tokenizer = self._resume() or self._start()
        self.vocabulary = tokenizers.vocabulary(tokenizer)
        self.files = tokenizers.with_companions(self.tokenizer_file)
        self.end = tokenizers.end_of_text(tokenizer, self.files)
        self.dtype = tokens.dtype_for(self.vocabulary)
        self.first = _first_tokens(config, self.files)

    def run(self) -> dict:
        """Write the remaining parts, and return the header. Raises ConfigError if there is no text to train on."""
        config, unread = self.config, Unread()
        train_on = config.train_on if self.masked else None
        settings = Encoding(self.tokenizer_file, self.end, self.dtype, config.validation_fraction, train_on, self.first)
        pace, read = _Pace(documents.size(config)), documents.documents(config, unread)
        if self.held_out is not None:
            read = (d for d in read if is_held_out(d.text, config.validation_fraction))
        remaining = pace.track(itertools.islice(read, _count(self.parts, "documents"), None))
        with closing(encode_documents(remaining, settings, config.processes)) as encoded:
            while self._write_part(encoded, pace):
                self._save_progress()
        if self.held_out == 0:  # a stream without held-out documents, which has read no row
            next(documents.documents(config, unread), None)
        tokenizer = transformers_tokenizer.load(self.files, self.directory) if self.masked else None
        template = tokenizer and chat_template.all_templates(tokenizer)
        for keys in conversations.unread_keys(unread, template, config.train_on):
            warn(f"data={config.name}: {keys}")
        if self.held_out is None and not _count(self.parts, "tokens", ("train",)):
            source = f"data.source={config.source}, data.path={config.path!r}"
            if self.parts:
                raise ConfigError(f"{source}: every document is held out; set data.validation_fraction=0")
            raise ConfigError(f"{source}: there is no text to train on; add documents")
        return {
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

    def _write_part(self, encoded: Iterator[Encoded], pace: "_Pace") -> bool:
        """Write one part and return True; or return False if no document is left."""
        if self.held_out is not None and self.held_out <= _count(self.parts, "tokens", ("validation",)):
            return False
        if (first := next(encoded, None)) is None:
            return False
        limits = {"train": PART_TOKENS, "validation": self.held_out or math.inf}
        with PartWriter(self.directory, len(self.parts), self.masked) as part:
            for held_out, ids, mask, unknown in itertools.chain([first], encoded):
                self.unknown += unknown
                part.add("validation" if held_out else "train", ids, mask)
                if pace.timer.is_due():
                    written = [*self.parts, part.counts]
                    count, total = _count(written, "tokens"), _count(written, "documents")
                    self.on_progress(f"{total:,} documents, {count:,} tokens{pace}")
                if any(part.counts[split]["tokens"] >= limit for split, limit in limits.items()):
                    break
        self.parts.append(part.header())
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
        finished = {name for part in self.parts for name in part["files"]}
        clear(self.directory, finished | {PROGRESS, *tokenizers.with_companions(self.tokenizer_file)})
        if count := _count(self.parts, "documents"):
            self.on_progress(f"resuming after {count:,} documents")
        return tokenizer

    def _load_progress(self, progress: dict) -> Tokenizer:
        """Adopt the finished parts and return the tokenizer. Invalid JSON content may raise any of the errors above."""
        if progress["identity"] != self.identity:
            raise ValueError("another corpus or other settings")
        if TokenFiles(self.directory).fingerprint() != progress["tokenizer"]:
            raise ValueError("another tokenizer.json")
        tokenizer, parts = tokenizers.read(self.tokenizer_file), list(progress["parts"])
        tokens.check_parts(parts, tokens.dtype_for(tokenizers.vocabulary(tokenizer)), self.masked)
        if progress["documents"] != (count := _count(parts, "documents")):
            raise ValueError(f"{progress['documents']} documents, but its parts have {count}")
        files = tokens.entries(self.directory, parts)
        tokens.check_sizes(files)
        tokens.check_content(files)
        (self.unknown,) = counts([progress.get("unknown", 0)])
        self.parts = parts
        return tokenizer

    def _start(self) -> Tokenizer:
        clear(self.directory)
        if self.config.tokenizer:
            files = transformers_tokenizer.from_config(self.config)
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
        texts = (d.text for d in documents.documents(self.config) if not is_held_out(d.text, fraction))
        return tokenizers.train(texts, vocabulary)

    def _save_progress(self) -> None:
        progress = {
            "identity": self.identity,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "documents": _count(self.parts, "documents"),
            "unknown": self.unknown,
            "parts": self.parts,
        }
        replace_file(self.directory / PROGRESS, json.dumps(progress))
        sync(self.directory)


def _count(parts: Iterable[dict], kind: str, splits: Iterable[str] = SPLITS) -> int:
    """Return the number of ``tokens`` or ``documents`` of parts."""
    return sum(part[split][kind] for part in parts for split in splits)


class _Pace:
    """Fraction of the corpus that is read, and the time left; ``size`` is in bytes, or None if it is not known."""

    def __init__(self, size: int | None):
        self.size, self.read = size, 0
        self.read_before: int | None = None
        self.started, self.timer = time.monotonic(), ReportTimer()

    def track(self, remaining: Iterable[Document]) -> Iterator[Document]:
        for document in remaining:
            if self.read_before is None:  # the speed does not include the bytes of resumed parts
                self.read_before, self.started = document.bytes_read, time.monotonic()
            self.read = document.bytes_read
            yield document

    def __str__(self) -> str:
        if not self.size or self.read_before is None or self.read <= self.read_before:
            return ""
        left = (time.monotonic() - self.started) * (self.size - self.read) / (self.read - self.read_before)
        return f", {self.read / self.size:.0%} read, {timedelta(seconds=round(left))} left"
