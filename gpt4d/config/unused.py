"""Settings that a run does not read, by the conditions beside their fields: each is an error, with a remedy.

Every run reads the settings without a condition, or may name them (``data.cache_dir``, the machine ``cluster``).
"""

from typing import Any

from gpt4d.config.composing import CONFIG_DIR, preset
from gpt4d.config.keys import known_keys, stated
from gpt4d.config.schema import Config
from gpt4d.config.values import command_text, value_of
from gpt4d.runtime.errors import ConfigError


def unused_keys(config: Config) -> dict[str, str]:
    """Return the keys that are set but not read by a run of ``config``, each with the reason and the remedy.

    A key is set if its value differs from the schema's default. Keys of ``data``, ``model`` and ``optim`` must also
    differ from the value in the chosen file of ``configs/``.
    """
    default = Config(model=type(config.model)())
    reasons = {
        key: next(filter(None, (condition(config) for each in stated(key, "read_if") for condition in each)), None)
        for key in conditional_keys()
        if _is_set(config, default, key)
    }
    return {key: reason for key, reason in reasons.items() if reason}


def check_unused(config: Config) -> None:
    """Raise ConfigError for the first key that is set but not read by a run of ``config``."""
    for key, reason in unused_keys(config).items():
        raise ConfigError(f"{key}={command_text(value_of(config, key))}: {reason}")


def conditional_keys() -> list[str]:
    """Return the keys that only some configurations read."""
    return [key for key in known_keys() if stated(key, "read_if")]


def _is_set(config: Config, defaults: Config, key: str) -> bool:
    group, _, name = key.partition(".")
    if group == "model" and not hasattr(config.model, name):
        return False
    value: Any = value_of(config, key)
    default = value_of(defaults, key)
    if value == (None if key == "data.tokenizer_vocab" else default) or value in stated(key, "off"):  # interpolated
        return False
    if group == "optim":  # from the model's file, or a file of configs/optim, which the model's file may name
        files = [preset("optim", path.stem) for path in CONFIG_DIR.glob("optim/*.yaml")]
        return all(value != file.get(name) for file in [preset("model", config.model.name, "optim"), *files])
    return group not in ("data", "model") or value != preset(group, getattr(config, group).name).get(name, default)
