"""The form of overrides on a command line, checked before Hydra reads them."""

import re
from collections.abc import Collection, Sequence

from gpt4d.config.keys import groups, key_types, known_keys, meant_key, unknown_key
from gpt4d.runtime.errors import ConfigError

_HYDRA_FLAGS = {
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
}  # fmt: skip
_WHOLE_FLOAT = re.compile(r"[+-]?\d+(\.0*)?([eE]\+?\d+)?|[+-]?\d*\.\d+[eE]\+?\d+")
_NO_NAME = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)|true|false|null", re.IGNORECASE)
_MAIN_KEYS = {"parallel.pipeline": "stages"}  # key that a value of the group sets


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask a command to print its description."""
    return bool({"--help", "-h"} & {*arguments})


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with integers for integer keys: ``train.steps=600`` for ``train.steps=6e2``.

    Raises ConfigError for unknown keys and for settings written as ``--key value``. The message suggests the key.
    """
    integers = {key for key, kind in key_types().items() if kind in (int, int | None)}
    checked = []
    for place, override in enumerate(overrides):
        if override.startswith("--") and override.partition("=")[0] not in _HYDRA_FLAGS:
            raise flag_error(override, overrides[place + 1 : place + 2])
        check_text(override)
        key, equals, value = override.partition("=")
        if equals and not key:
            raise ConfigError(f"{override}: no key before the =; use train.steps=100, for example")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key) and not key.startswith("hydra"):
            _check_key(key, value)
            if key in integers:
                override = f"{key}={','.join(map(whole_number, value.split(',')))}"
        checked.append(override)
    return checked


def check_text(argument: str) -> None:
    """Raise ConfigError unless an argument of the command line is text: the shell passes on any bytes."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{argument!r}: not UTF-8; write it in that encoding") from None


def whole_number(text: str) -> str:
    """Return an integer in scientific notation as decimal digits, such as 600 for 6e2; any other text unchanged."""
    if not _WHOLE_FLOAT.fullmatch(text) or not float(text).is_integer():
        return text
    return str(int(float(text)))


def _check_key(key: str, value: str) -> None:
    """Raise ConfigError for a name that is not a key, a prefix of a key or a group of choices."""
    known, kinds = known_keys(), groups()
    if key in kinds and "." in key:  # the groups without a dot have choices: model=gpt_125m
        main = _MAIN_KEYS.get(key)
        remedy = f"set {key}.{main}={value}" if main else f"set {', '.join(key_types(kinds[key], f'{key}.'))}"
        raise ConfigError(f"{key}={value}: a group of keys; {remedy}")
    if key in kinds and any(_NO_NAME.fullmatch(choice) for choice in value.split(",")):
        raise ConfigError(f"{key}={value}: a choice of {key} is a name; train.py --help lists them")
    parts = key.split(".")
    prefixes = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    if key not in kinds and not prefixes & {*known}:
        raise unknown_key(key)


def flag_error(flag: str, following: Sequence[str], own: Collection[str] = ()) -> ConfigError:
    """Return the error for ``--key value``. ``own``: additional keys of the command."""
    name, equals, value = flag.removeprefix("--").partition("=")
    if name.replace("-", "_") in own:
        name = name.replace("-", "_")
    if not equals:
        value = next((text for text in following if not text.startswith("-") and "=" not in text), "…")
    key = name if name in {*known_keys(), *own} else meant_key(name)
    example = f"{key}={value}" if key else "train.steps=100, for example"
    return ConfigError(f"{flag}: settings are key=value; use {example}")
