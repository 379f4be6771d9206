"""From YAML files and words on a command line to the typed settings; what does not fit, told in one line."""

import difflib
import re
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from gpt4d.config.schema import ClusterConfig, Config, ConfigError, ModelConfig

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"


def compose(overrides: list[str] | None = None) -> Config:
    """``configs/train.yaml`` with ``overrides`` (Hydra's grammar), typed. ConfigError where they do not fit."""
    import hydra

    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return to_config(hydra.compose("train", overrides=expand_cluster(overrides or [])))
    except Exception as error:
        raise to_config_error(error) from None


def to_config(composed) -> Config:
    """The dataclasses behind what Hydra composed, interpolations resolved. ConfigError for keys added with ``+``."""
    from omegaconf import OmegaConf

    known = set(known_keys())
    added = {key for key in _flat_keys(OmegaConf.to_container(composed)) if not known & set(_beginnings(key))}
    if added:
        raise unknown_key(min(added))
    return OmegaConf.to_object(composed)


def read_cluster(path: str | Path) -> ClusterConfig:
    """A machine that ``gpt4d.planner.calibrate`` has written down. ConfigError if it is none."""
    from omegaconf import OmegaConf

    try:
        read = OmegaConf.load(path)
        if not read:
            raise ConfigError("an empty file; python -m gpt4d.planner.calibrate writes one")
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ClusterConfig), read))
    except FileNotFoundError:
        raise ConfigError(f"cluster={path}: no such file") from None
    except Exception as error:
        raise ConfigError(f"cluster={path}: {' '.join(str(to_config_error(error, ClusterConfig)).split())}") from None


def expand_cluster(words: list[str]) -> list[str]:
    """Overrides with ``cluster=FILE.yaml`` told value by value: Hydra would look for it among configurations."""
    spelled = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "cluster" and value.endswith((".yaml", ".yml")):
            read = asdict(read_cluster(value))
            spelled += [f"cluster.{name}={_in_hydras_grammar(found)}" for name, found in read.items()]
        else:
            spelled.append(word)
    return spelled


def _in_hydras_grammar(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_hydras_grammar(found)}" for key, found in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_hydras_grammar, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "null" if value is None else repr(value)


def from_arguments(schema: type, arguments: list[str]) -> Any:
    """An instance of the dataclass ``schema`` filled from ``key=value`` words; ConfigError for anything else."""
    from omegaconf import OmegaConf

    config, texts = OmegaConf.structured(schema), {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r}: arguments are key=value, with the keys {', '.join(known_keys(schema))}")
        if key not in known_keys(schema):
            raise unknown_key(key, schema)
        if get_type_hints(schema)[key] is str:
            texts[key] = value  # to the letter: OmegaConf would read ${…} in it
            value = "given"
        try:
            config[key] = value
        except Exception as error:
            raise to_config_error(error, schema) from None
    for key in OmegaConf.missing_keys(config):
        raise ConfigError(f"{key}=… is missing")
    return replace(OmegaConf.to_object(config), **texts)


_model_schemas: dict[str, type[ModelConfig]] = {}


def register_model(name: str, schema: type[ModelConfig]) -> None:
    """Let Hydra check the settings of a model family: ``model=<name>`` selects them with their defaults."""
    from hydra.core.config_store import ConfigStore

    _model_schemas[name] = schema
    ConfigStore.instance().store(group="model", name=name, node=schema)


def _register_schema() -> None:
    """Let Hydra check ``configs/train.yaml`` and every override against ``Config``."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


_register_schema()


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every key of a config class, dotted: ``parallel.gx``."""
    keys: dict[str, None] = {}
    for name, kind in get_type_hints(schema).items():
        if not is_dataclass(kind):
            keys[prefix + name] = None
            continue
        for group in [kind, *(_model_schemas.values() if kind is ModelConfig else ())]:
            keys |= dict.fromkeys(known_keys(group, f"{prefix}{name}."))
    return list(keys)


def _flat_keys(values: dict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        keys += _flat_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


def _beginnings(key: str) -> list[str]:
    """Of ``data.blend.a``: data, data.blend, data.blend.a."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def unknown_key(key: str, schema: type = Config) -> ConfigError:
    keys = known_keys(schema)
    prefix, _, name = key.rpartition(".")
    group = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == prefix}
    near = difflib.get_close_matches(name, group, n=1)
    if near:
        remedy = f"did you mean {group[near[0]]}?"
    elif elsewhere := [k for k in keys if k.endswith("." + name)]:
        remedy = f"did you mean {elsewhere[0]}?"
    else:
        remedy = f"there are {', '.join(group or sorted({k.partition('.')[0] + '.…' for k in keys}))}"
    return ConfigError(f"{key}: there is no such key; {remedy}")


def to_config_error(error: BaseException, schema: type = Config) -> BaseException:
    """Hydra's and OmegaConf's complaints as one line; any other error as it is."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return error
    cause = error.__cause__ or error  # Hydra wraps what OmegaConf found
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r}: not an override; a value with signs in it is quoted twice: 'key=\"a, b\"'"
        )
    key = getattr(cause, "full_key", None)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return unknown_key(key, schema)
    # The rest of their texts is about their own internals.
    text = re.split(r"full_key:|Config search path:|See https:", str(cause))[0]
    text = " ".join(text.split())
    return ConfigError(f"{key}: {text}" if key else text)
