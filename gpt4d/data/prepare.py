"""Turn a corpus into token files: ``python -m gpt4d.data.prepare data=text data.path="GLOB" out=DIR``.

Other arguments are overrides as for train.py: ``data=jsonl data.path='*.jsonl.gz' data.tokenizer=gpt2``, or
``data=chat data.path='sft/*.jsonl' data.tokenizer=RUN`` for conversations. Train on the
files with ``data=tokens data.path=DIR``. The same command resumes an interrupted preparation. ``python -m
gpt4d.data.prepare verify=DIR`` checks token files against their checksums.
"""

import os
import sys
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gpt4d.config import PREPARED, ConfigError, DataConfig, asks_for_help, check_limits, compose
from gpt4d.config.checks import unused_keys
from gpt4d.config.commands import one_line_errors
from gpt4d.data.checks import check_data
from gpt4d.data.completion import complete
from gpt4d.data.directory import SPLITS
from gpt4d.data.preparation import prepare
from gpt4d.data.tokens import TokenFiles
from gpt4d.model import registry  # noqa: F401 – registers the settings of the model families for compose


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
        for split in SPLITS
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
