"""``python -m gpt4d.data.prepare data=text data.path="GLOB" out=DIR``: a corpus becomes token files.

Other words are overrides as train.py takes them: ``data=jsonl data.path='*.jsonl.gz' data.tokenizer=gpt2
model.vocab_size=50257``. ``data=tokens data.path=DIR`` trains on them. A preparation that was interrupted goes on where
it was when it is called again. ``python -m gpt4d.data.prepare verify=DIR`` checks token files against their checksums.
"""

import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from gpt4d.config import ConfigError, DataConfig, check_data, compose, tokenizer_file
from gpt4d.data import documents, tokenizers, tokens
from gpt4d.data.documents import Document
from gpt4d.data.tokens import TokenFiles, file_name
from gpt4d.errors import one_line_errors
from gpt4d.files import NewFile, sync, write_file

_PART_TOKENS = 1 << 26  # of the training split, then another part begins: what an interruption may cost
_BATCH_CHARACTERS = 1 << 18  # of the documents a process encodes at a time
_WORD_S = 2.0  # between two words of how it goes
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Corpus:
    """What a run trains on: token files, and where there are several the weight of each."""

    files: list[TokenFiles]
    weights: list[float]

    @property
    def first(self) -> TokenFiles:
        """Whose tokenizer is that of all."""
        return self.files[0]


def corpus(config: DataConfig) -> Corpus:
    """The token files of ``data``, made now unless they are in the cache.

    ConfigError for what cannot be read, for token files that are not whole, not for the model, or not alike.
    """
    if config.source in ("tokens", "blend"):
        weights = config.blend if config.source == "blend" else {config.path: 1.0}
        found = [TokenFiles.opened(Path(path).expanduser()) for path in weights]
        for files in found:
            if files.header["vocabulary"] > config.tokenizer_vocab:
                raise ConfigError(
                    f"{files.directory}: made with {files.header['vocabulary']} tokens, more than "
                    f"data.tokenizer_vocab={config.tokenizer_vocab}; raise model.vocab_size, and that where it is set"
                )
            if files.fingerprint() != found[0].fingerprint():
                raise ConfigError(
                    f"{files.directory}: made with another tokenizer than {found[0].directory}; prepare it anew with "
                    f"data.tokenizer={found[0].directory}"
                )
        return Corpus(found, list(weights.values()))
    name = hashlib.sha256(_identity(config).encode()).hexdigest()[:16]
    directory = Path(config.cache_dir) / f"{config.name}-{name}"
    return Corpus([prepare(config, directory, lambda words: print(f"{directory}: {words}", flush=True))], [1.0])


def prepare(config: DataConfig, out: Path, told: Callable[[str], None] = lambda text: None) -> TokenFiles:
    """The token files of a corpus in ``out``, made now unless they are there. ``told`` is told how it goes.

    They appear under this name only once they are whole; until then they are in ``out``.partial, where an interrupted
    preparation finds what it had. ConfigError if there is no text to train on.
    """
    if (out / tokens.HEADER).exists():
        return TokenFiles.opened(out)
    if out.exists():
        raise ConfigError(f"out={out}: exists and has no token files; choose another name, or remove it")
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _alone(partial, told):
            if not out.exists():  # another job may have made it while this one waited
                _Preparation(config, partial, told).run()
                os.rename(partial, out)
                sync(out.parent)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: {error.strerror or error}; it needs room and a place to write to"
        ) from None
    return TokenFiles.opened(out)


def _identity(config: DataConfig) -> str:
    """What the token files depend on."""
    kind = _given(config) if config.tokenizer else config.tokenizer_vocab
    return repr((tokens.FORMAT, documents.identity(config), kind, config.validation_fraction))


def _given(config: DataConfig) -> str:
    """The tokenizer.json of ``data.tokenizer``; a file as it is, since its fingerprint tells models apart."""
    tokenizer, file = tokenizers.given(config), tokenizer_file(config.tokenizer)
    return file.read_text(encoding="utf-8") if file.is_file() else tokenizer.to_str()


@contextmanager
def _alone(directory: Path, told: Callable[[str], None]) -> Iterator[None]:
    """Makes two jobs that prepare the same take turns. The lock is the directory's, whatever its name becomes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told(f"another job prepares {directory}: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Preparation:
    """Writes part after part, in the order of the documents. What it has done stands in ``progress.json``."""

    def __init__(self, config: DataConfig, directory: Path, told: Callable[[str], None]):
        self.config, self.directory, self.told = config, directory, told
        self.identity = hashlib.sha256(_identity(config).encode()).hexdigest()
        self.parts: list[dict] = []
        self.done = 0  # documents, in whole parts
        self.tokenizer = self._resumed() or self._begun()
        self.end = tokenizers.end_of_text(self.tokenizer)
        self.dtype = "uint16" if tokenizers.vocabulary(self.tokenizer) <= 2**16 else "uint32"

    def run(self) -> None:
        at = self.done
        pace = _Pace(documents.size(self.config))
        encoded = self._encoded(pace.watched(itertools.islice(documents.documents(self.config), self.done, None)))
        while True:
            part = _Part(self.directory, len(self.parts))
            with part:
                for held_out, ids in encoded:
                    part.add("validation" if held_out else "train", ids)
                    at += 1
                    if pace.due():
                        every = (*self.parts, part.counts)
                        count = sum(counts[split]["tokens"] for counts in every for split in tokens.SPLITS)
                        self.told(f"{at:,} documents, {count:,} tokens{pace}")
                    if part.counts["train"]["tokens"] >= _PART_TOKENS:
                        break
            if at == self.done:
                part.remove()
                break
            self.parts.append(part.told())
            self.done = at
            self._note_progress()
        if not sum(part["train"]["tokens"] for part in self.parts):
            where = f"data.source={self.config.source}, data.path={self.config.path!r}"
            mend = "; set data.validation_fraction=0, all of it is held out" if self.parts else ""
            raise ConfigError(f"{where}: there is no text to train on{mend}")
        header = {
            "format": tokens.FORMAT,
            "dtype": self.dtype,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "vocabulary": tokenizers.vocabulary(self.tokenizer),
            "end_of_text": self.end,
            "parts": self.parts,
        }
        write_file(self.directory / tokens.HEADER, json.dumps(header, indent=1).encode())
        (self.directory / _PROGRESS).unlink()
        sync(self.directory)

    def _resumed(self) -> Tokenizer | None:
        """The tokenizer of an interrupted preparation of the same corpus; None if there was none."""
        try:
            progress = json.loads((self.directory / _PROGRESS).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if progress["identity"] != self.identity:
            return None
        self.parts, self.done = progress["parts"], progress["documents"]
        kept = {name for part in self.parts for name in part["files"]} | {_PROGRESS, "tokenizer.json"}
        for path in self.directory.iterdir():
            if path.name not in kept:
                path.unlink()  # of the part that was interrupted
        if self.done:
            self.told(f"going on after {self.done:,} documents")
        return tokenizers.read(self.directory / "tokenizer.json")

    def _begun(self) -> Tokenizer:
        for path in self.directory.iterdir():
            path.unlink()
        path = self.directory / "tokenizer.json"
        text = _given(self.config) if self.config.tokenizer else self._trained().to_str()
        write_file(path, text.encode())
        self._note_progress()
        return tokenizers.read(path)

    def _trained(self) -> Tokenizer:
        self.told(f"training a tokenizer of {self.config.tokenizer_vocab:,} tokens")
        fraction = self.config.validation_fraction
        texts = (d.text for d in documents.documents(self.config) if not documents.held_out(d.text, fraction))
        return tokenizers.train(texts, self.config.tokenizer_vocab)

    def _note_progress(self) -> None:
        progress = {"identity": self.identity, "documents": self.done, "parts": self.parts}
        new = self.directory / (_PROGRESS + ".new")
        new.unlink(missing_ok=True)
        write_file(new, json.dumps(progress).encode())
        os.replace(new, self.directory / _PROGRESS)
        sync(self.directory)

    def _encoded(self, todo: Iterable[Document]) -> Iterator[tuple[bool, np.ndarray]]:
        """Whether each document is held out, and its ids with the end's, in order; several processes share the work."""
        how = self.config.validation_fraction, self.end, self.dtype
        processes = self.config.processes or _cores()
        batches = _batches(todo)
        first = list(itertools.islice(batches, 2))
        if processes == 1 or len(first) < 2:  # not worth the start of a process
            for texts in itertools.chain(first, batches):
                yield from _encode_all(texts, self.tokenizer, *how)
            return
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes, _start_process, (str(self.directory / "tokenizer.json"), *how)) as pool:
            under_way: deque = deque()  # bounded: a corpus may be larger than memory
            for texts in itertools.chain(first, batches):
                under_way.append(pool.apply_async(_encode_in_process, (texts,)))
                if len(under_way) > 2 * processes:
                    yield from under_way.popleft().get()
            while under_way:
                yield from under_way.popleft().get()


class _Pace:
    """How far the reading of a corpus is, in bytes of ``size`` (None: not known), and how long the rest will take."""

    def __init__(self, size: int | None):
        self.size, self.read, self.before = size, 0, None
        self.started = time.monotonic()
        self.next_word = self.started + _WORD_S

    def watched(self, todo: Iterable[Document]) -> Iterator[Document]:
        for document in todo:
            if self.before is None:  # what an earlier preparation did says nothing about the pace of this one
                self.before, self.started = document.read, time.monotonic()
            self.read = document.read
            yield document

    def due(self) -> bool:
        """Whether it is time for a word again."""
        if time.monotonic() < self.next_word:
            return False
        self.next_word += _WORD_S
        return True

    def __str__(self) -> str:
        if not self.size or self.before is None or self.read <= self.before:
            return ""
        left = (time.monotonic() - self.started) * (self.size - self.read) / (self.read - self.before)
        return f", {self.read / self.size:.0%} read, {timedelta(seconds=round(left))} left"


class _Part:
    """The files of a part while they are written."""

    def __init__(self, directory: Path, number: int):
        self.directory, self.number = directory, number
        self.counts = {split: {"tokens": 0, "documents": 0} for split in tokens.SPLITS}
        self.files = {
            (split, suffix): NewFile(directory / file_name(split, number, suffix))
            for split in tokens.SPLITS
            for suffix in ("bin", "idx")
        }

    def add(self, split: str, ids: np.ndarray) -> None:
        count = self.counts[split]
        count["tokens"] += len(ids)
        count["documents"] += 1
        self.files[split, "bin"].write(ids.data.cast("B"))
        self.files[split, "idx"].write(np.asarray([count["tokens"]], np.uint64).data.cast("B"))

    def told(self) -> dict:
        files = {file_name(s, self.number, suffix): f.entry._asdict() for (s, suffix), f in self.files.items()}
        return {**self.counts, "files": files}

    def remove(self) -> None:
        for split, suffix in self.files:
            (self.directory / file_name(split, self.number, suffix)).unlink()

    def __enter__(self) -> None: ...

    def __exit__(self, *error) -> None:
        for file in self.files.values():
            file.__exit__(*error)


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


def _encode_all(
    texts: list[str], tokenizer: Tokenizer, fraction: float, end: int, dtype: str
) -> list[tuple[bool, np.ndarray]]:
    return [
        (documents.held_out(text, fraction), np.array([*tokenizers.encode(tokenizer, text), end], dtype))
        for text in texts
    ]


def _start_process(tokenizer: str, *how) -> None:
    global _in_process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _in_process = tokenizers.read(Path(tokenizer)), *how


def _encode_in_process(texts: list[str]) -> list[tuple[bool, np.ndarray]]:
    return _encode_all(texts, *_in_process)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: list[str]) -> None:
    words = dict(word.partition("=")[::2] for word in arguments if word.startswith(("out=", "verify=")))
    if "verify" in words:
        TokenFiles.opened(Path(words["verify"])).verify()
        print(f"{words['verify']}: whole")
        return
    if not words.get("out"):
        raise ConfigError("out=… is missing: the directory that the token files are to be in")
    config = compose([word for word in arguments if not word.startswith("out=")]).data
    if config.source in ("tokens", "blend"):
        raise ConfigError(f"data.source={config.source}: these are token files already; prepare takes text")
    check_data(config)
    out = Path(words["out"])
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as shown:
        line = shown.add_task(f"preparing {out}", total=None)
        files = prepare(config, out, lambda words: shown.update(line, description=words))
    counts = ", ".join(
        f"{split} {files.count(split, 'documents'):,} documents of {files.count(split, 'tokens'):,} tokens"
        for split in tokens.SPLITS
    )
    print(
        f"{out}: {counts}\ntrain on it with data=tokens data.path={out} model.vocab_size={files.header['vocabulary']}"
    )


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
