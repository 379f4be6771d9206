"""Tokenizers as transformers reads them: those that settings name, and the tokenizer of a checkpoint."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from gpt4d.config import HEADER, ConfigError, DataConfig, tokenizer_file
from gpt4d.data import hub, tokenizers
from gpt4d.data.tokenizers import FILE, SETTINGS
from gpt4d.runtime.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_SETTINGS = "generation_config.json"
_MODEL_SETTINGS = "config.json"  # of an imported model; the class of its tokenizer may depend on it
_LEGACY_TEMPLATE = "chat_template.json"


def files_of(key: str, name: str) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json and its ``companions``.

    tokenizer.json has the tokens that transformers computes from all files. It is rewritten only if its own tokens
    differ, since runs compare its fingerprint. Raises ConfigError, which names the setting ``key``, if the tokenizer
    cannot be used.

    Args:
        key: the setting that names the tokenizer.
        name: gpt2, a file or directory, or a name on the hub.
    """
    problem = None
    try:
        if name == "gpt2":
            files = {FILE: tokenizers.gpt2().to_str().encode()}
        elif (file := tokenizer_file(name)).is_file():
            files = tokenizers.with_companions(file)
            if SETTINGS in files and not any((file.parent / own).exists() for own in (HEADER, "meta.json")):
                files |= _as_in_transformers(files, file.with_name("config.json"))
        else:
            from transformers import AutoTokenizer

            if file.exists():
                raise ValueError(f"{file} is not a regular file")
            problem = None if Path(name).is_dir() else hub.unreachable()
            with tempfile.TemporaryDirectory() as directory:
                # Without this argument the library asks the user whether to run code of the repository.
                AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(directory)
                files = tokenizers.with_companions(Path(directory) / FILE)
        tokenizers.end_of_text(Tokenizer.from_buffer(files[FILE]), files)
    except BaseException as error:
        if not tokenizers.of_library(error):
            raise
        if "trust_remote_code" in str(error):
            problem = "it needs Python code from its repository, which gpt4d never runs"
        raise ConfigError(
            f"{key}={name}: not a usable tokenizer ({problem or one_line(error)}); use gpt2, a tokenizer.json, "
            "its directory, or a hub name"
        ) from None
    return files


def from_config(config: DataConfig) -> dict[str, bytes]:
    """Return the files of ``data.tokenizer`` (``files_of``), with the template of ``data.chat_template`` if set.

    Raises ConfigError if it cannot be used, or has more than ``data.tokenizer_vocab`` tokens (None: no limit).
    """
    name = config.tokenizer
    assert name is not None
    files = files_of("data.tokenizer", name)
    tokenizer = tokenizers.parse(files, name)
    if config.tokenizer_vocab is not None and tokenizers.vocabulary(tokenizer) > config.tokenizer_vocab:
        raise ConfigError(
            f"data.tokenizer={name}: its {tokenizers.vocabulary(tokenizer)} tokens are more than "
            f"data.tokenizer_vocab={config.tokenizer_vocab}; raise model.vocab_size, and data.tokenizer_vocab if set"
        )
    if config.chat_template:
        files = {name: content for name, content in files.items() if not name.startswith(tokenizers.TEMPLATES)}
        files[tokenizers.TEMPLATE] = Path(os.path.expanduser(config.chat_template)).read_bytes()
    return files


def _as_in_transformers(files: Mapping[str, bytes], model: Path) -> dict[str, bytes]:
    """Return the tokenizer.json and the settings of the tokenizer that transformers builds from ``files``.

    ``model``: the path of the config.json next to them, if present, on which the class of the tokenizer depends.
    """
    own, settings = tokenizers.complete(Tokenizer.from_buffer(files[FILE])), dict(json.loads(files[SETTINGS]))
    if "fast_tokenizer_files" in settings:
        raise ValueError(f"fast_tokenizer_files of {SETTINGS} names other files; save it again with transformers 5")
    found = load(files, ".")
    if model.is_file():
        alone, found = type(found), load({**files, model.name: model.read_bytes()}, ".")
        if type(found) is not alone:
            text = json.dumps({**settings, "tokenizer_class": type(found).__name__}, indent=2, ensure_ascii=False)
            files = {**files, SETTINGS: text.encode()}
    theirs = found.backend_tokenizer
    if tokenizers.first_and_last(own) == tokenizers.first_and_last(theirs):
        theirs.post_processor = own.post_processor  # transformers replaces null by one that adds no token
    changed = own.to_str() != theirs.to_str()
    return {SETTINGS: files[SETTINGS], FILE: tokenizers.rewritten(files, theirs) if changed else files[FILE]}


def write(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    directory: Path,
    max_length: int | None,
    former_length: int | None = None,
) -> None:
    """Write a tokenizer such that transformers 4 and 5 load it.

    Args:
        tokenizer: the tokenizer in ``files``.
        files: its files, by name.
        directory: existing directory to write to.
        max_length: maximum length of the model's texts, for a tokenizer without settings; None: not known.
        former_length: maximum length before the model was extended. ``max_length`` replaces it in the settings.
    """
    if SETTINGS in files:
        for name in filter(tokenizers.belongs, files):
            path = directory / _path(name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(files[name])
    else:
        from transformers import PreTrainedTokenizerFast

        end = tokenizer.id_to_token(tokenizers.end_of_text(tokenizer, files))
        first = tokenizers.first_tokens(tokenizer)
        begin = tokenizer.id_to_token(first[0]) if first else end
        special = {"bos_token": begin, "eos_token": end} | tokenizers.special_tokens(files)
        exported = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)
        exported.save_pretrained(directory)
        if tokenizers.TEMPLATE in files:
            (directory / tokenizers.TEMPLATE).write_bytes(files[tokenizers.TEMPLATE])
    settings = dict(json.loads((directory / SETTINGS).read_bytes()))
    before = dict(settings)
    if settings.get("tokenizer_class") in (None, "TokenizersBackend"):  # transformers 5 only
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 expects a dictionary there
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings.get("model_max_length") == former_length:
        settings["model_max_length"] = max_length
    if settings != before:
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (directory / SETTINGS).write_text(text, encoding="utf-8")


def _path(name: str) -> str:
    """Return the path of a tokenizer's file in a directory of transformers (``tokenizers.companions``)."""
    further = f"{tokenizers.TEMPLATES}."
    return f"{tokenizers.TEMPLATES}/{name.removeprefix(further)}" if name.startswith(further) else name


def load(files: Mapping[str, bytes], checkpoint: object, max_length: int | None = None) -> Any:
    """Return the tokenizer of a checkpoint, a PreTrainedTokenizerBase without dropout.

    Arguments as for ``write``; ``checkpoint`` is the path in the message. Raises ConfigError if the checkpoint has no
    tokenizer, or a damaged one.
    """
    if FILE not in files:
        raise ConfigError(
            f"checkpoint={checkpoint}: it has no tokenizer; import the model with tokenizer=NAME, or train it with "
            "data.tokenizer"
        )
    tokenizer = tokenizers.parse(files, checkpoint)
    from transformers import AutoTokenizer

    damaged = f"{checkpoint}: transformers cannot read the files of the tokenizer (%s); restore them"
    with tempfile.TemporaryDirectory() as directory, tokenizers.library_errors(damaged):
        write(tokenizer, files, Path(directory), max_length)
        for name in {_MODEL_SETTINGS, SETTINGS} & files.keys():  # unchanged: they decide the class
            (Path(directory) / name).write_bytes(files[name])
        found: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        tokenizers.complete(found.backend_tokenizer)
        if _LEGACY_TEMPLATE in files and not found.chat_template:  # transformers reads it with a processor
            found.chat_template = json.loads(files[_LEGACY_TEMPLATE])["chat_template"]
        return found


def end_tokens(tokenizer: "PreTrainedTokenizerBase", files: Mapping[str, bytes]) -> list[int]:
    """Return the ids of the tokens that end a text: the tokenizer's token, and tokens of the generation settings.

    Raises ConfigError for damaged generation settings.
    """
    try:
        own = dict(json.loads(files.get(GENERATION_SETTINGS, b"{}"))).get("eos_token_id")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{GENERATION_SETTINGS} of the checkpoint: damaged ({error}); restore the file") from None
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return list(dict.fromkeys(int(token) for token in ids if token is not None))
