"""Shared code of the families' adapters: checks of a ``config.json``, and a usage example. No torch here."""

from collections.abc import Mapping, Sequence

from gpt4d.config import ConfigError

# Usage example of a text model for its model card. PATH stands for the model's directory.
TEXT_USAGE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(ids[0]))
"""


def unsupported(source: str, key: str, value: object, supported: object) -> ConfigError:
    """Return the error for a setting that gpt4d computes differently."""
    return ConfigError(f"{source}: {key}={value!r} in config.json is not supported; use a model with {key}={supported}")


def check_supported(source: str, values: Mapping, choices: Mapping[str, Sequence]) -> None:
    """Raise ConfigError unless each of some settings is missing or has one of its ``choices``."""
    for key, supported in choices.items():
        if values.get(key, supported[0]) not in supported:
            raise unsupported(source, key, values[key], repr(supported[0]))


def check_sizes(source: str, sizes: Mapping[str, object]) -> None:
    """Raise ConfigError unless all sizes are integers above 0."""
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{source}: {key}={size!r} in config.json is not a size; use a number above 0")
