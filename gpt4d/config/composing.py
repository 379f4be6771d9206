"""Composition of the typed settings from YAML files and command-line overrides."""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

from gpt4d.config import machine
from gpt4d.config.fields import check_limits, flattened
from gpt4d.config.keys import groups, key_types, known_keys, meant_key, model_schemas, unknown_key
from gpt4d.config.length import with_steps
from gpt4d.config.schema import ClusterConfig, Config, ModelConfig, OptimConfig
from gpt4d.runtime.errors import ConfigError

CONFIG_DIR = (Path(__file__).parent / "files").resolve()  # a link to configs/ in a clone, a directory in a wheel
_HYDRA_FLAGS = {
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
}  # fmt: skip
_WHOLE_FLOAT = re.compile(r"[+-]?\d+(\.0*)?([eE]\+?\d+)?|[+-]?\d*\.\d+[eE]\+?\d+")
_NO_NAME = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)|true|false|null", re.IGNORECASE)
_MAIN_KEYS = {"parallel.pipeline": "stages"}  # key that a value of the group sets


def compose(overrides: list[str] | None = None) -> Config:
    """Return ``configs/train.yaml`` with ``overrides`` in Hydra's grammar. Raises ConfigError for invalid overrides.

    It follows from configs, overrides and environment alone. ``gpt4d.data.completion`` adds the values that follow from
    other files.
    """
    import hydra

    if not CONFIG_DIR.is_dir():
        raise ConfigError(f"{CONFIG_DIR}: no such directory; install gpt4d again")
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return to_config(hydra.compose("train", overrides=expand_cluster(overrides or [])))
    except Exception as error:
        raise to_config_error(error) from None


def to_config(composed) -> Config:
    """Return Hydra's composition as resolved dataclasses, with the steps of ``train.tokens``.

    Raises ConfigError for unknown keys added by ``+``.
    """
    from omegaconf import OmegaConf

    # OmegaConf reads derived fields as keys.
    derived = [each for each in fields(ModelConfig) if each.metadata.get("derived")]
    unset = {f"model.{each.name}" for each in derived if composed.model.get(each.name) == each.default}
    known = set(known_keys()) | unset
    values = cast(dict, OmegaConf.to_container(composed))
    added = {key for key in flattened(values, ".") if not known & set(_prefixes(key))}
    if added:
        raise unknown_key(min(added))
    for key, value in flattened(values, ".").items():
        if any("\0" in text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
            raise ConfigError(f"{key}={value!a}: has the character NUL, which no name and no path contains; remove it")
    config = cast(Config, OmegaConf.to_object(composed))
    config.cluster = machine.sized(config.cluster)
    if config.lora.rank:
        config.model = replace(config.model, lora=config.lora)
    if config.optim.width_transfer:
        config.model = replace(config.model, width=config.model.relative_width() or 1.0)
    model = preset("model", config.model.name, "train")
    return with_steps(config, **({"default": model["steps"]} if "steps" in model else {}))


def choices(group: str) -> list[str]:
    """Return the choices of a group: its files under ``configs/`` and the names registered with Hydra."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return GlobalHydra.instance().config_loader().get_group_options(group)


def preset(group: str, name: str, section: str = "") -> dict[str, Any]:
    """Return the settings in the YAML file of a choice, such as ``preset("data", "c4")``; empty without such a file.

    ``section``: another group whose settings a model's file contains.
    """
    from omegaconf import OmegaConf

    path = CONFIG_DIR / group / f"{name}.yaml"
    settings = cast(dict, OmegaConf.to_container(OmegaConf.load(path))) if path.is_file() else {}
    return settings.get(section, {}) if section else settings.get(group, settings)


def read_cluster(path: str | Path) -> ClusterConfig:
    """Read the file of a machine, which ``gpt4d.planner.calibrate`` writes. Raises ConfigError if it is invalid."""
    from omegaconf import OmegaConf

    try:
        values = OmegaConf.load(path)
        if not values:
            raise ConfigError("the file is empty; write it with python -m gpt4d.planner.calibrate")
        return cast(ClusterConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ClusterConfig), values)))
    except FileNotFoundError:
        raise ConfigError(f"cluster={path}: no such file; use a name in configs/cluster or an existing file") from None
    except Exception as error:
        raise ConfigError(f"cluster={path}: {' '.join(str(to_config_error(error, ClusterConfig)).split())}") from None


def expand_cluster(overrides: list[str]) -> list[str]:
    """Return overrides for Hydra, with ``cluster=FILE.yaml`` replaced by the values in that file.

    Hydra itself finds files in configs/ only.

    Raises ConfigError for keys that do not exist, and for a file that cannot be used.
    """
    expanded = []
    for override in checked_overrides(overrides):
        key, _, value = override.partition("=")
        if key == "cluster" and value.endswith((".yaml", ".yml")):
            settings = asdict(read_cluster(value))
            expanded += [f"cluster.{name}={format_for_hydra(setting)}" for name, setting in settings.items()]
        else:
            expanded.append(override)
    _check_family(expanded)
    return expanded


def _check_family(overrides: Sequence[str]) -> None:
    """Raise ConfigError if ``model`` is a family that has presets, and no override gives a size."""
    name = next((override.removeprefix("model=") for override in overrides if override.startswith("model=")), None)
    if name not in model_schemas or any(override.startswith("model.") for override in overrides):
        return
    files = sorted(CONFIG_DIR.glob("model/*.yaml"))
    sizes = [path.stem for path in files if f"- {name}@model\n" in path.read_text(encoding="utf-8")]
    if sizes:
        raise ConfigError(
            f"model={name}: a family of models, not a size; choose one of {', '.join(sizes)}, or set its "
            "sizes with model.KEY=VALUE"
        )


def format_for_hydra(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{format_for_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(format_for_hydra, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "null" if value is None else repr(value)


def from_arguments(schema: type, arguments: list[str]) -> Any:
    """Return an instance of the dataclass ``schema`` from ``key=value`` arguments. Raises ConfigError if one is not."""
    from omegaconf import MISSING, OmegaConf

    config, texts = OmegaConf.structured(schema), {}
    for argument in arguments:
        check_text(argument)
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r}: not key=value; use the keys {', '.join(known_keys(schema))}")
        if key not in known_keys(schema):
            raise unknown_key(key, schema)
        default = getattr(schema, key, None)
        if not value and default and isinstance(default, str):
            remedy = "" if default == MISSING else f", or leave it out for {default}"
            raise ConfigError(f"{key}=: empty; give a value{remedy}")
        if get_type_hints(schema)[key] in (str, str | None) and value != "null":
            texts[key] = value  # literal text: OmegaConf interpolates ${…}
            value = "placeholder"
        elif get_type_hints(schema)[key] in (int, int | None):
            value = whole_number(value)
        try:
            config[key] = value
        except Exception as error:
            raise to_config_error(error, schema) from None
    for key in OmegaConf.missing_keys(config):
        raise ConfigError(f"{key}=… is missing")
    settings = replace(cast(Any, OmegaConf.to_object(config)), **texts)
    check_limits(settings)
    return settings


def register_model(name: str, schema: type[ModelConfig]) -> None:
    """Register the settings of a model family with Hydra: ``model=<name>`` selects them with their defaults."""
    from hydra.core.config_store import ConfigStore

    model_schemas[name] = schema
    ConfigStore.instance().store(group="model", name=name, node=schema)


def _register_schema() -> None:
    """Register ``Config`` with Hydra, which then checks ``configs/train.yaml`` and all overrides against it."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="optim", name="adamw", node=OptimConfig)  # overrides the values in the model's file
    default = asdict(ClusterConfig())
    for name, cluster in machine.gpu_clusters().items():
        stated = {key: value for key, value in asdict(cluster).items() if value != default[key]}
        store.store(group="cluster", name=name, node=stated)
    machine.register_resolver()
    OmegaConf.register_new_resolver("sequences", _sequences, replace=True)


def _sequences(tokens: int, length: int) -> int:
    """Return the largest power of two of sequences that have at most ``tokens`` tokens in total; at least 1."""
    return 1 << max(0, (tokens // length).bit_length() - 1)


_register_schema()


def _prefixes(key: str) -> list[str]:
    """Return the prefixes of a key: data, data.blend and data.blend.a for ``data.blend.a``."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def to_config_error(error: BaseException, schema: type = Config) -> BaseException:
    """Return an error of Hydra or OmegaConf as a ConfigError of one line, any other error unchanged."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return error
    raised: BaseException | None = error
    while raised:  # OmegaConf wraps the error of a resolver
        if isinstance(raised, ConfigError):
            return raised
        raised = raised.__cause__ or raised.__context__
    cause = error.__cause__ or error  # Hydra wraps the errors of OmegaConf
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override!r}: not a valid override; quote special characters twice: 'key=\"a, b\"'")
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file and cause.options:
        return _unknown_choice(cause.missing_cfg_file, cause.options)
    key = getattr(cause, "full_key", None)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return unknown_key(key, schema)
    # The rest of the text describes internals of Hydra and OmegaConf.
    text = re.split(r"full_key:|Config search path:|See https:", str(cause))[0]
    text = " ".join(text.split())
    return ConfigError(f"{key}: {text}" if key else text)


def _unknown_choice(path: str, options: Sequence[str]) -> ConfigError:
    """Return the error for a choice of a group that does not exist, such as ``model/gpt_125M``."""
    group, _, name = path.rpartition("/")
    similar = difflib.get_close_matches(name.lower(), options, n=1)
    if group == "optim" and not similar:
        remedy = "use optim=adamw or optim=muon, or leave it out for the model's settings"
    else:
        remedy = f"did you mean {similar[0]}?" if similar else f"use one of {', '.join(options)}"
    return ConfigError(f"{group}={name}: there is no such choice; {remedy}")


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
    if key not in kinds and not {*_prefixes(key)} & {*known}:
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
