"""Documents become ids, in this process or shared out to several."""

import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers
from gpt4d.data.documents import Document, held_out

_BATCH_CHARACTERS = 1 << 18  # of the documents a process encodes at a time

Encoded = tuple[bool, np.ndarray]  # whether a document is held out, and its ids with the end's


class Encoding(NamedTuple):
    """How documents become ids."""

    tokenizer: Path
    end: int  # the id that ends a document
    dtype: str
    fraction: float  # of the documents, that are held out


def encoded(todo: Iterable[Document], how: Encoding, processes: int | None) -> Iterator[Encoded]:
    """Each document, in order; so many processes (None: as many as there are cores) share the work.

    ConfigError if one of them was ended from outside.
    """
    processes = processes or _cores()
    batches = _batches(todo)
    first = list(itertools.islice(batches, 2))
    if processes == 1 or len(first) < 2:  # not worth the start of a process
        tokenizer = tokenizers.read(how.tokenizer)
        for texts in itertools.chain(first, batches):
            yield from _encode_all(texts, tokenizer, how)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_process, (how,))
    try:
        under_way: deque = deque()  # bounded: a corpus may be larger than memory
        for texts in itertools.chain(first, batches):
            under_way.append(pool.submit(_encode_in_process, texts))
            if len(under_way) > 2 * processes:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(
            f"data.processes={processes}: a process that encodes was ended (out of memory?); use fewer, and the "
            "preparation goes on where it was"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(todo: Iterable[Document]) -> Iterator[list[str]]:
    """Texts of about ``_BATCH_CHARACTERS`` together."""
    batch, size = [], 0
    for document in todo:
        batch.append(document.text)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_all(texts: list[str], tokenizer: Tokenizer, how: Encoding) -> list[Encoded]:
    return [
        (held_out(text, how.fraction), np.array([*tokenizers.encode(tokenizer, text), how.end], how.dtype))
        for text in texts
    ]


def _start_process(how: Encoding) -> None:
    global _in_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the one that began the work tells of it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _in_process = tokenizers.read(how.tokenizer), how


def _encode_in_process(texts: list[str]) -> list[Encoded]:
    return _encode_all(texts, *_in_process)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
