"""Encoding of documents into token ids, in this process or in a pool of processes."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers
from gpt4d.data.documents import Document, is_held_out
from gpt4d.runtime.parent import end_with_parent

BATCH_CHARACTERS = 1 << 18  # characters that one task encodes

Encoded = tuple[bool, np.ndarray]  # whether the document is held out; its ids, the end-of-text id last
_process_state: "tuple[Tokenizer, Encoding]"  # set in each encoding process


class Encoding(NamedTuple):
    """Settings of an encoding process."""

    tokenizer: Path
    end: int  # end-of-text id, appended to every document
    dtype: str
    fraction: float  # fraction of documents that is held out for validation


def encode_documents(documents: Iterable[Document], encoding: Encoding, processes: int | None) -> Generator[Encoded]:
    """Yield the encoded documents in order, by default with one process per core.

    Raises ConfigError if a process is killed.
    """
    processes = processes or _cores()
    batches = _batches(documents)
    first = list(itertools.islice(batches, 2))
    if processes == 1 or len(first) < 2:  # one batch is not worth starting a process
        tokenizer = tokenizers.read(encoding.tokenizer)
        for texts in itertools.chain(first, batches):
            yield from _encode_batch(texts, tokenizer, encoding)
        return
    # If this process is killed, multiprocessing's tracker removes the pool's semaphores. It inherits the options of
    # warnings and need not report that.
    sys.warnoptions.append("ignore:resource_tracker")
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_process, (encoding,))
    sys.warnoptions.pop()
    try:
        pending: deque = deque()  # bounded, since a corpus may be larger than memory
        for texts in itertools.chain(first, batches):
            with _blocked_ctrl_c():
                pending.append(pool.submit(_encode_in_process, texts))  # starts a process if all are busy
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


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Group texts into batches of about ``BATCH_CHARACTERS``."""
    batch, size = [], 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(texts: list[str], tokenizer: Tokenizer, encoding: Encoding) -> list[Encoded]:
    return [
        (
            is_held_out(text, encoding.fraction),
            np.array([*tokenizers.encode(tokenizer, text), encoding.end], encoding.dtype),
        )
        for text in texts
    ]


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
    _process_state = tokenizers.read(encoding.tokenizer), encoding


def _encode_in_process(texts: list[str]) -> list[Encoded]:
    return _encode_batch(texts, *_process_state)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
