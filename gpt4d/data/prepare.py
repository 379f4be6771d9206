"""``python -m gpt4d.data.prepare data=text data.path="GLOB" out=DIR``: a corpus becomes token files.

Other words are overrides as train.py takes them: ``data=jsonl data.path='*.jsonl.gz' data.tokenizer=gpt2
model.vocab_size=50257``. ``data=tokens data.path=DIR`` trains on them. A preparation that was interrupted goes on where
it was when it is called again. ``python -m gpt4d.data.prepare verify=DIR`` checks token files against their checksums.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from gpt4d.config import ConfigError, DataConfig, check_data, compose, tokenizer_file
from gpt4d.data import documents, encoding, parts, tokenizers, tokens
from gpt4d.data.documents import Document
from gpt4d.data.encoding import Encoded, Encoding
from gpt4d.data.sampler import whole_shares
from gpt4d.data.tokens import TokenFiles
from gpt4d.files import sync, write_file
from gpt4d.runtime.errors import one_line_errors

_PART_TOKENS = 1 << 26  # of the training split, then another part begins: what an interruption may cost
_WORD_S = 2.0  # between two words of how it goes
_PROGRESS = "progress.json"
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Corpus:
    """What a run trains on: token files, and where there are several the weight of each."""

    files: list[TokenFiles]
    weights: list[int]

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
        shares = whole_shares(list(weights.values()))
        found = [TokenFiles.opened(Path(os.path.expanduser(path))) for path in weights]
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
        return Corpus(found, shares)
    directory = Path(os.path.expanduser(config.cache_dir)) / f"{config.name}-{_identity(config)[:16]}"
    return Corpus([prepare(config, directory, lambda words: print(f"{directory}: {words}", flush=True))], [1])


def prepare(config: DataConfig, out: Path, told: Callable[[str], None] = lambda text: None) -> TokenFiles:
    """The token files of a corpus in ``out``, made now unless they are there. ``told`` is told how it goes.

    They appear under this name only once they are whole; until then they are in ``out``.partial, where an interrupted
    preparation finds what it had. ConfigError if there is no text to train on, or ``out`` has something else.
    """
    identity = _identity(config)
    try:
        if not out.exists():
            _make(config, identity, out, told)
        elif not (out / tokens.HEADER).exists():
            raise ConfigError(f"out={out}: exists and has no token files; choose another name, or remove it")
    except OSError as error:
        mend = "; it needs room and a place to write to" if error.errno in _NO_PLACE else ""
        raise ConfigError(f"{error.filename or out}: {error.strerror or error}{mend}") from None
    files = TokenFiles.opened(out)
    if files.header["identity"] != identity:
        raise ConfigError(
            f"out={out}: holds the tokens of another corpus or other settings; choose another name, or remove it"
        )
    return files


def _make(config: DataConfig, identity: str, out: Path, told: Callable[[str], None]) -> None:
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _alone(partial, told):
        if not out.exists():  # another job may have made it while this one waited
            _Preparation(config, identity, partial, told).run()
            os.rename(partial, out)
            sync(out.parent)
            (out / _PROGRESS).unlink()  # not before: without it all would be made anew


def _identity(config: DataConfig) -> str:
    """A hash of what the token files depend on."""
    kind = _given(config) if config.tokenizer else config.tokenizer_vocab
    facts = (tokens.FORMAT, documents.identity(config), kind, config.validation_fraction)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


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

    def __init__(self, config: DataConfig, identity: str, directory: Path, told: Callable[[str], None]):
        self.config, self.identity, self.directory, self.told = config, identity, directory, told
        self.tokenizer_file = directory / "tokenizer.json"
        self.parts: list[dict] = []
        self.done = 0  # documents, in whole parts
        tokenizer = self._resumed() or self._begun()
        self.vocabulary, self.end = tokenizers.vocabulary(tokenizer), tokenizers.end_of_text(tokenizer)
        self.dtype = parts.dtype_for(self.vocabulary)

    def run(self) -> None:
        how = Encoding(self.tokenizer_file, self.end, self.dtype, self.config.validation_fraction)
        pace = _Pace(documents.size(self.config))
        todo = pace.watched(itertools.islice(documents.documents(self.config), self.done, None))
        with closing(encoding.encoded(todo, how, self.config.processes)) as encoded:
            while self._write_part(encoded, pace):
                self._note_progress()
        if not sum(part["train"]["tokens"] for part in self.parts):
            where = f"data.source={self.config.source}, data.path={self.config.path!r}"
            mend = "; set data.validation_fraction=0, all of it is held out" if self.parts else ""
            raise ConfigError(f"{where}: there is no text to train on{mend}")
        header = {
            "format": tokens.FORMAT,
            "identity": self.identity,
            "dtype": self.dtype,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "vocabulary": self.vocabulary,
            "end_of_text": self.end,
            "parts": self.parts,
        }
        write_file(self.directory / tokens.HEADER, json.dumps(header, indent=1).encode())
        sync(self.directory)

    def _write_part(self, encoded: Iterator[Encoded], pace: "_Pace") -> bool:
        """False if there was no document left for it."""
        part = parts.Part(self.directory, len(self.parts))
        with part:
            for held_out, ids in encoded:
                part.add("validation" if held_out else "train", ids)
                if pace.due():
                    every = (*self.parts, part.counts)
                    count = sum(counts[split]["tokens"] for counts in every for split in parts.SPLITS)
                    self.told(f"{self.done + part.documents:,} documents, {count:,} tokens{pace}")
                if part.counts["train"]["tokens"] >= _PART_TOKENS:
                    break
        if not part.documents:
            part.remove()
            return False
        self.parts.append(part.told())
        self.done += part.documents
        return True

    def _resumed(self) -> Tokenizer | None:
        """The tokenizer of an interrupted preparation; None if there was none, or it cannot be gone on with."""
        path = self.directory / _PROGRESS
        if not path.exists():
            return None
        try:
            tokenizer = self._kept(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.told(f"beginning anew, for what is there is not this preparation's, or damaged ({error})")
            return None
        kept = {name for part in self.parts for name in part["files"]} | {_PROGRESS, self.tokenizer_file.name}
        for path in self.directory.iterdir():
            if path.name not in kept:
                path.unlink()  # of the part that was interrupted
        if self.done:
            self.told(f"going on after {self.done:,} documents")
        return tokenizer

    def _kept(self, progress: dict) -> Tokenizer:
        """Takes over what is done. An error of any kind that JSON can make if it is not as it was written."""
        if progress["identity"] != self.identity:
            raise ValueError("of another corpus or other settings")
        if TokenFiles(self.directory).fingerprint() != progress["tokenizer"]:
            raise ValueError("another tokenizer.json")
        tokenizer = tokenizers.read(self.tokenizer_file)
        found = parts.checked(progress["parts"], parts.dtype_for(tokenizers.vocabulary(tokenizer)))
        done = sum(part[split]["documents"] for part in found for split in parts.SPLITS)
        if progress["documents"] != done:
            raise ValueError(f"{progress['documents']} documents, {done} in its parts")
        parts.check_sizes(self.directory, found)
        parts.check_content(self.directory, found)
        self.parts, self.done = found, done
        return tokenizer

    def _begun(self) -> Tokenizer:
        for path in self.directory.iterdir():
            path.unlink()
        text = _given(self.config) if self.config.tokenizer else self._trained().to_str()
        write_file(self.tokenizer_file, text.encode())
        self._note_progress()
        return tokenizers.read(self.tokenizer_file)

    def _trained(self) -> Tokenizer:
        self.told(f"training a tokenizer of {self.config.tokenizer_vocab:,} tokens")
        fraction = self.config.validation_fraction
        texts = (d.text for d in documents.documents(self.config) if not documents.held_out(d.text, fraction))
        return tokenizers.train(texts, self.config.tokenizer_vocab)

    def _note_progress(self) -> None:
        progress = {
            "identity": self.identity,
            "tokenizer": TokenFiles(self.directory).fingerprint(),
            "documents": self.done,
            "parts": self.parts,
        }
        new = self.directory / (_PROGRESS + ".new")
        new.unlink(missing_ok=True)
        write_file(new, json.dumps(progress).encode())
        os.replace(new, self.directory / _PROGRESS)
        sync(self.directory)


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


def main(arguments: list[str]) -> None:
    words = dict(word.partition("=")[::2] for word in arguments if word.startswith(("out=", "verify=")))
    if "verify" in words:
        TokenFiles.opened(Path(os.path.expanduser(words["verify"]))).verify()
        print(f"{words['verify']}: whole")
        return
    if not words.get("out"):
        raise ConfigError("out=… is missing: the directory that the token files are to be in")
    config = compose([word for word in arguments if not word.startswith("out=")]).data
    if config.source in ("tokens", "blend"):
        raise ConfigError(f"data.source={config.source}: these are token files already; prepare takes text")
    check_data(config)
    out = Path(os.path.expanduser(words["out"]))
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as shown:
        line = shown.add_task(f"preparing {out}", total=None)
        files = prepare(config, out, lambda words: shown.update(line, description=words))
    counts = ", ".join(
        f"{split} {files.count(split, 'documents'):,} documents of {files.count(split, 'tokens'):,} tokens"
        for split in parts.SPLITS
    )
    print(
        f"{out}: {counts}\ntrain on it with data=tokens data.path={out} model.vocab_size={files.header['vocabulary']}"
    )


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
