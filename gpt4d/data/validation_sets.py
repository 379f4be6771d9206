"""The token files of the validation sets in ``data.validation``."""

import os
from dataclasses import replace
from pathlib import Path

from gpt4d.config import ConfigError, DataConfig, is_megatron, written_source
from gpt4d.data.megatron import megatron_files
from gpt4d.data.prepare import Corpus, corpus
from gpt4d.data.tokens import ALL, TokenFiles


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
            files = _prepared(config, own, name, path)
    except ConfigError as error:
        raise ConfigError(f"data.validation.{name}={path}: {error}") from None
    if files.fingerprint() != own.fingerprint():
        raise ConfigError(
            f"data.validation.{name}={path}: made with another tokenizer than {own.directory}; prepare it again with "
            f"data.tokenizer={own.directory}"
        )
    if files.first_tokens != own.first_tokens:
        raise ConfigError(
            f"data.validation.{name}={path}: its documents begin with other tokens than {own.location}; "
            f"prepare it again with data.begin_of_text={str(bool(own.first_tokens)).lower()}"
        )
    trained_on = next((source for source in training.files if source.content() == files.content()), None)
    if trained_on is None:
        return files, ALL
    if not trained_on.count("validation", "tokens"):
        raise ConfigError(
            f"data.validation.{name}={path}: the run trains on all of these tokens; use other text, or prepare them "
            "again with data.validation_fraction above 0"
        )
    return trained_on, "validation"


def _prepared(config: DataConfig, own: TokenFiles, name: str, path: str) -> TokenFiles:
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
