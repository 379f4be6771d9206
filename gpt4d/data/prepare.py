"""Turn a corpus into token files: ``python -m gpt4d.data.prepare data=text data.path="GLOB" out=DIR``.

Other arguments are overrides as for train.py: ``data=jsonl data.path='*.jsonl.gz' data.tokenizer=gpt2``, or
``data=chat data.path='sft/*.jsonl' data.tokenizer=RUN`` for conversations. Train on the
files with ``data=tokens data.path=DIR``. The same command resumes an interrupted preparation. ``python -m
gpt4d.data.prepare verify=DIR`` checks token files against their checksums.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gpt4d.config import (
    HEADER,
    PREPARED,
    ConfigError,
    DataConfig,
    asks_for_help,
    blend_paths,
    blend_stages,
    check_limits,
    compose,
    is_megatron,
)
from gpt4d.config.checks import unused_keys
from gpt4d.config.commands import one_line_errors
from gpt4d.data import parts
from gpt4d.data.checks import check_data
from gpt4d.data.completion import complete
from gpt4d.data.directory import in_cache, write_once
from gpt4d.data.megatron import MegatronFiles, megatron_files
from gpt4d.data.preparation import PROGRESS, Preparation, identity_of
from gpt4d.data.sampler import integer_shares
from gpt4d.data.tokens import TokenFiles
from gpt4d.model import registry  # noqa: F401 – registers the settings of the model families for compose
from gpt4d.runtime import activity


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
            if files.fingerprint() != sources[0].fingerprint():
                own, other = sorted((sources[0], files), key=lambda each: each.by_index)
                if other.by_index:
                    raise ConfigError(
                        f"data.tokenizer={config.tokenizer}: not the tokenizer that made {own.location}, which is "
                        f"blended with {other.location}; set data.tokenizer={own.location}"
                    )
                raise ConfigError(
                    f"{files.directory}: made with another tokenizer than {sources[0].directory}; prepare it again "
                    f"with data.tokenizer={sources[0].directory}"
                )
            _check_first_tokens(config, files, sources[0])
        return Corpus(sources, shares)
    with activity.unlimited():  # a tokenizer may be downloaded
        identity = identity_of(config)
    directory = in_cache(config, identity)
    return Corpus([prepare(config, directory, lambda text: print(f"{directory}: {text}", flush=True), identity)], [[1]])


def _check_first_tokens(config: DataConfig, files: TokenFiles, other: TokenFiles) -> None:
    """Raise ConfigError unless the documents of ``files`` begin as ``data.begin_of_text`` and ``other`` say."""
    chosen, has = config.begin_of_text, bool(files.first_tokens)
    if chosen is not None and chosen != has:
        raise ConfigError(
            f"data.begin_of_text={str(chosen).lower()}: the documents in {files.location} begin "
            f"{'with' if has else 'without'} the tokenizer's first token; leave it out, or prepare them again"
        )
    if files.first_tokens != other.first_tokens:
        raise ConfigError(
            f"{files.location}: its documents begin with other tokens than {other.location}; prepare it again "
            f"with data.begin_of_text={str(bool(other.first_tokens)).lower()}"
        )


def held_out_corpus(config: DataConfig, identity: str, tokens: int) -> Corpus:
    """Return token files of the first held-out documents of a corpus that is streamed, and of no training documents.

    They have at least ``tokens`` tokens, if the corpus has that many. They are prepared unless they are in the cache.
    ``identity``: the result of ``identity_of``. Raises ConfigError for text that cannot be read.
    """
    identity = hashlib.sha256(repr((identity, tokens)).encode()).hexdigest()
    directory = in_cache(config, identity)

    def report(text: str) -> None:
        print(f"{directory}: held-out documents: {text}", flush=True)

    return Corpus([prepare(config, directory, report, identity, tokens)], [[1]])


def _open(config: DataConfig, path: str) -> TokenFiles:
    """Return the token files ``path``: a directory, or the prefix of Megatron's files."""
    if config.source == "megatron" or is_megatron(path):
        return megatron_files(config, path)
    return TokenFiles.open(Path(os.path.expanduser(path)))


def opened(directory: str, prefix: str | None) -> TokenFiles:
    """Return token files of a directory that another rank has opened; files of Megatron also have a ``prefix``."""
    return TokenFiles(Path(directory)) if prefix is None else MegatronFiles(Path(directory), prefix)


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

    def write(partial: Path) -> None:
        Preparation(config, identity, partial, on_progress, held_out).run()

    created = write_once(out, write, on_progress)
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


def main(arguments: list[str]) -> None:
    """Prepare or verify token files as the command-line ``arguments`` ask."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    paths = dict(argument.partition("=")[::2] for argument in arguments if argument.startswith(("out=", "verify=")))
    if "verify" in paths:
        TokenFiles.open(Path(os.path.expanduser(paths["verify"]))).verify()
        print(f"{paths['verify']}: intact")
        return
    if not paths.get("out"):
        raise ConfigError("out=…: missing; set it to the directory to write the token files to")
    overrides = [argument for argument in arguments if not argument.startswith("out=")]
    for word in overrides:
        if not word.startswith("--") and word.partition("=")[0].partition(".")[0] not in ("data", "model"):
            raise ConfigError(f"{word}: a preparation reads settings of data alone; leave it out")
    composed = complete(compose(overrides))
    config = composed.data
    if config.source in PREPARED:
        raise ConfigError(f"data.source={config.source}: these are token files already; choose a source of text")
    if config.stream:
        raise ConfigError("data.stream=true: a run tokenizes the text while it trains; leave it out to prepare tokens")
    check_limits(config, "data.")
    check_data(config, composed.model.name)
    for key, reason in unused_keys(composed).items():
        if key.startswith("data."):
            raise ConfigError(f"{key}: {reason}")
    _check_tokenizer(config, any(argument.startswith("data.tokenizer_vocab=") for argument in arguments))
    if config.tokenizer:
        config.tokenizer_vocab = None  # a model limits the vocabulary, and a preparation has none
    out = Path(os.path.expanduser(paths["out"]))
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as display:
        line = display.add_task(f"preparing {out}", total=None)
        files = prepare(config, out, lambda text: display.update(line, description=text))
    kind = "conversations" if files.masked else "documents"
    counts = ", ".join(
        f"{split} {files.count(split, 'documents'):,} {kind} of {files.count(split, 'tokens'):,} tokens"
        + f" ({files.count(split, 'trained'):,} have a loss)" * files.masked
        for split in parts.SPLITS
    )
    model = " train=finetune checkpoint.init=RUN" if files.masked else ""
    for remark in files.remarks():
        print(f"{out}: {remark}")
    print(f"{out}: {counts}\ntrain on it with data=tokens data.path={out}{model}")


def _check_tokenizer(config: DataConfig, vocabulary_is_set: bool) -> None:
    if config.tokenizer and vocabulary_is_set:
        raise ConfigError(
            f"data.tokenizer_vocab={config.tokenizer_vocab}: data.tokenizer={config.tokenizer} has its own vocabulary; "
            "leave one of the two out"
        )
    if config.source == "hub" and not (config.tokenizer or vocabulary_is_set):
        raise ConfigError(
            f"data.tokenizer=null: {config.path} is downloaded twice to train a tokenizer on it; set "
            "data.tokenizer=gpt2 or another one, or the size of one to train, data.tokenizer_vocab"
        )


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
