"""Encoding of documents into token ids, in this process or in a pool of processes."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers
from gpt4d.data.chat_template import ChatEncoder
from gpt4d.data.conversations import Conversation
from gpt4d.data.documents import Document, is_held_out
from gpt4d.runtime.parent import end_with_parent

BATCH_CHARACTERS = 1 << 18  # characters that one task encodes

Encode = Callable[[Document], "Encoded"]
_process_state: Encode  # set in each encoding process


class Encoded(NamedTuple):
    """The tokens of a document.

    Attributes:
        held_out: whether the document is in the validation split.
        ids: its token ids in the dtype of the files. A text has the first tokens before it, and ends with end-of-text.
        mask: uint8, 1 for the tokens of a conversation that have a loss; None for a text, whose tokens all have one.
        unknown: number of its characters and words that are not in the vocabulary.
    """

    held_out: bool
    ids: np.ndarray
    mask: np.ndarray | None = None
    unknown: int = 0


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
    processes = processes or _cores()
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
