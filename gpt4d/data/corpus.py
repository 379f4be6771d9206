"""The token files of a run: prepared or found on one rank, opened on all ranks, and verified once."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch.distributed as dist

from gpt4d.config import PREPARED, ConfigError, DataConfig, blend_paths, blend_stages, is_megatron, written_source
from gpt4d.data import tokens
from gpt4d.data.directory import in_cache, printer
from gpt4d.data.megatron import MegatronFiles, megatron_files
from gpt4d.data.preparation import identity_of, prepare
from gpt4d.data.sampler import integer_shares
from gpt4d.data.tokens import ALL, TokenFiles
from gpt4d.runtime import activity
from gpt4d.runtime.consensus import all_gather_json, run_on_all_ranks, run_on_rank0
from gpt4d.runtime.files import FileEntry, read_regular, replace_file, required_file

FILE = "verified.json"
_NAME = "verifying token files"
Files = Sequence[tuple[Path, FileEntry]]
State = list[int | str]  # size, time of the last change in ns, checksum


@dataclass(frozen=True)
class Corpus:
    """Token files to train on, with an integer weight of each in each stage of a blend; without a blend, one stage."""

    files: list[TokenFiles]
    weights: list[list[int]]

    @property
    def first(self) -> TokenFiles:
        """The first token files. All token files have the same tokenizer."""
        return self.files[0]

    def fingerprint(self, firsts: Sequence[int] = (0,)) -> str:
        """Return a hash of the tokens of both splits, in the order of the files, and of the weights.

        ``firsts``: the first sample of each stage.
        """
        assert len(firsts) == len(self.weights)
        facts: list[tuple] = [
            (files.checksums(), *weights)
            for files, weights in zip(self.files, zip(*self.weights, strict=True), strict=True)
        ]
        if len(firsts) > 1:
            facts.append(tuple(firsts))
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def corpus(config: DataConfig) -> Corpus:
    """Return the token files of ``data``, and prepare them unless they are in the cache.

    Raises ConfigError for text that cannot be read. Token files raise it if they are incomplete or have different
    tokenizers.
    """
    if config.source in PREPARED:
        blend = config.blend if config.source == "blend" else {cast(str, config.path): 1.0}
        paths = blend_paths(blend)
        shares = [integer_shares([stage.weights.get(path, 0) for path in paths]) for stage in blend_stages(blend)]
        sources = [_open(config, path) for path in paths]
        for files in sources:
            if files.masked != sources[0].masked:
                text, chat = sorted((files, sources[0]), key=lambda each: each.masked)
                raise ConfigError(
                    f"data.blend: {chat.location} has conversations and {text.location} has text; blend one kind"
                )
            if files.fingerprint() != sources[0].fingerprint() and (files.by_index or sources[0].by_index):
                own, other = sorted((sources[0], files), key=lambda each: each.by_index)
                raise ConfigError(
                    f"data.tokenizer={config.tokenizer}: not the tokenizer that made {own.location}, which is "
                    f"blended with {other.location}; set data.tokenizer={own.location}"
                )
            _check_tokens(files.location, files, sources[0])
            chosen, has = config.begin_of_text, bool(files.first_tokens)
            if chosen is not None and chosen != has:
                raise ConfigError(
                    f"data.begin_of_text={str(chosen).lower()}: the documents in {files.location} begin "
                    f"{'with' if has else 'without'} the tokenizer's first token; leave it out, or prepare them again"
                )
        return Corpus(sources, shares)
    with activity.unlimited():  # a tokenizer may be downloaded
        identity = identity_of(config)
    directory = in_cache(config, identity)
    return Corpus([prepare(config, directory, printer(directory), identity)], [[1]])


def _check_tokens(location: str, files: TokenFiles, own: TokenFiles) -> None:
    """Raise ConfigError, which begins with ``location``, unless two token files have equal tokens for a text."""
    if files.fingerprint() != own.fingerprint():
        raise ConfigError(
            f"{location}: made with another tokenizer than {own.directory}; prepare it again with "
            f"data.tokenizer={own.directory}"
        )
    if files.first_tokens != own.first_tokens:
        raise ConfigError(
            f"{location}: its documents begin with other tokens than {own.location}; prepare it again "
            f"with data.begin_of_text={str(bool(own.first_tokens)).lower()}"
        )


def held_out_corpus(config: DataConfig, identity: str, tokens: int) -> Corpus:
    """Return token files of the first held-out documents of a corpus that is streamed, and of no training documents.

    They have at least ``tokens`` tokens, if the corpus has that many. They are prepared unless they are in the cache.
    ``identity``: the result of ``identity_of``. Raises ConfigError for text that cannot be read.
    """
    identity = hashlib.sha256(repr((identity, tokens)).encode()).hexdigest()
    directory = in_cache(config, identity)
    report = printer(f"{directory}: held-out documents")
    return Corpus([prepare(config, directory, report, identity, tokens)], [[1]])


def _open(config: DataConfig, path: str) -> TokenFiles:
    """Return the token files ``path``: a directory, or the prefix of Megatron's files."""
    if config.source == "megatron" or is_megatron(path):
        return megatron_files(config, path)
    return TokenFiles.open(Path(os.path.expanduser(path)))


def opened(directory: str, prefix: str | None) -> TokenFiles:
    """Return token files of a directory that another rank has opened; files of Megatron also have a ``prefix``."""
    return TokenFiles(Path(directory)) if prefix is None else MegatronFiles(Path(directory), prefix)


def validation_sets(config: DataConfig, training: Corpus) -> dict[str, tuple[TokenFiles, str]]:
    """Return the token files and the split of each validation set, by name.

    Text is tokenized with the tokenizer of ``training`` unless it is in the cache, and Megatron's files are read with
    this tokenizer. A set has both splits of its token files. If the run trains on these token files, the set is their
    held-out split. Raises ConfigError for tokens of another tokenizer, and for files without text.
    """
    return {name: _validation_set(config, training, name, path) for name, path in (config.validation or {}).items()}


def _validation_set(config: DataConfig, training: Corpus, name: str, path: str) -> tuple[TokenFiles, str]:
    directory, own = Path(os.path.expanduser(path)), training.first
    try:
        if directory.is_dir():
            files = TokenFiles.open(directory)
        elif is_megatron(path):
            complete = replace(config, tokenizer=str(own.directory), tokenizer_vocab=None, validation_fraction=0.0)
            files = megatron_files(complete, path)
        else:
            files = _tokenized(config, own, name, path)
    except ConfigError as error:
        raise ConfigError(f"data.validation.{name}={path}: {error}") from None
    _check_tokens(f"data.validation.{name}={path}", files, own)
    trained_on = next((source for source in training.files if source.content() == files.content()), None)
    if trained_on is None:
        return files, ALL
    if not trained_on.count("validation", "tokens"):
        raise ConfigError(
            f"data.validation.{name}={path}: the run trains on all of these tokens; use other text, or prepare them "
            "again with data.validation_fraction above 0"
        )
    return trained_on, "validation"


def _tokenized(config: DataConfig, own: TokenFiles, name: str, path: str) -> TokenFiles:
    """Return the token files of a glob of text files, which are conversations if the run trains on conversations."""
    source = written_source(path)
    text = replace(
        config,
        name=name,
        source="chat" if source == "jsonl" and own.masked else source,
        path=path,
        skip_empty=True,  # an empty document has nothing to score
        blend=None,
        stream=False,
        tokenizer=str(own.directory),
        begin_of_text=None if own.masked else bool(own.first_tokens),
        chat_template=None,  # it is among the files of the tokenizer
        validation_fraction=0.0,
        validation=None,
    )
    return corpus(text).first


def verify(files: Files, run_dir: Path) -> None:
    """Compare files with the checksums of their entries, unless an earlier start of the run has already verified them.

    ``run_dir`` contains the record of verified files. All ranks call this and share the work.
    Raises ConfigError on every rank, naming the file, if a checksum differs.
    """
    record = run_dir / FILE

    def changed() -> list[int]:
        remembered = _read(record)
        return [n for n, item in enumerate(files) if remembered.get(_key(item[0])) != _state(*item)]

    def remember() -> None:
        with required_file(record):
            replace_file(record, json.dumps(_read(record) | states, indent=1))

    due = run_on_rank0(changed, "looking for changed token files")
    if not due:
        return
    share = sorted(due, key=lambda n: -files[n][1].bytes)[dist.get_rank() :: dist.get_world_size()]
    verified = run_on_all_ranks(lambda: {_key(files[n][0]): _verified(*files[n]) for n in share}, _NAME)
    states = {key: state for part in all_gather_json(verified, _NAME) for key, state in part.items()}
    run_on_rank0(remember, "recording verified token files")


def _key(path: Path) -> str:
    return str(path.resolve())


def _state(path: Path, entry: FileEntry) -> State:
    """Return the state in which a file is remembered; an empty list if it cannot be read."""
    with suppress(OSError):
        facts = path.stat()
        return [facts.st_size, facts.st_mtime_ns, entry.xxh3_128]
    return []


def _verified(path: Path, entry: FileEntry) -> State:
    before = _state(path, entry)  # A change while the file is read makes the next start read it again.
    tokens.check_content([(path, entry)])
    return before


def _read(record: Path) -> dict[str, State]:
    """Return the states of verified files by path; empty for a missing or damaged record."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(read_regular(record)))
    return {}
