"""The tokenizer of a checkpoint as transformers reads it."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_SETTINGS = "generation_config.json"
_MODEL_SETTINGS = "config.json"  # of an imported model; the class of its tokenizer may depend on it
_LEGACY_TEMPLATE = "chat_template.json"


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
    if tokenizers.SETTINGS in files:
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
    settings = dict(json.loads((directory / tokenizers.SETTINGS).read_bytes()))
    before = dict(settings)
    if settings.get("tokenizer_class") in (None, "TokenizersBackend"):  # transformers 5 only
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 expects a dictionary there
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings.get("model_max_length") == former_length:
        settings["model_max_length"] = max_length
    if settings != before:
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (directory / tokenizers.SETTINGS).write_text(text, encoding="utf-8")


def _path(name: str) -> str:
    """Return the path of a tokenizer's file in a directory of transformers (``tokenizers.companions``)."""
    further = f"{tokenizers.TEMPLATES}."
    return f"{tokenizers.TEMPLATES}/{name.removeprefix(further)}" if name.startswith(further) else name


def load(files: Mapping[str, bytes], checkpoint: object, max_length: int | None = None) -> Any:
    """Return the tokenizer of a checkpoint, a PreTrainedTokenizerBase without dropout.

    Arguments as for ``write``; ``checkpoint`` is the path in the message. Raises ConfigError if the checkpoint has no
    tokenizer, or a damaged one.
    """
    tokenizer = tokenizers.of_checkpoint(files, checkpoint)
    from transformers import AutoTokenizer

    damaged = f"{checkpoint}: transformers cannot read the files of the tokenizer (%s); restore them"
    with tempfile.TemporaryDirectory() as directory, tokenizers.library_errors(damaged):
        write(tokenizer, files, Path(directory), max_length)
        for name in {_MODEL_SETTINGS, tokenizers.SETTINGS} & files.keys():  # unchanged: they decide the class
            (Path(directory) / name).write_bytes(files[name])
        found: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        tokenizers.complete(found.backend_tokenizer)
        if _LEGACY_TEMPLATE in files and not found.chat_template:  # transformers reads it with a processor
            found.chat_template = json.loads(files[_LEGACY_TEMPLATE])["chat_template"]
        return found


def end_tokens(tokenizer: "PreTrainedTokenizerBase", files: Mapping[str, bytes]) -> list[int]:
    """Return the ids of the tokens that end a text: the tokenizer's token, and tokens of the generation settings."""
    settings = generation_settings(files)
    own = settings.get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return list(dict.fromkeys(int(token) for token in ids if token is not None))


def generation_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the generation settings in ``files``; none without a file. Raises ConfigError for a damaged file."""
    try:
        return dict(json.loads(files.get(GENERATION_SETTINGS, b"{}")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{GENERATION_SETTINGS} of the checkpoint: damaged ({error}); restore the file") from None
