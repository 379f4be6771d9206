"""All keys of the configuration, errors for keys that do not exist, and the effect of changed keys on a run.

Every key has one ``Effect`` on the numbers that a run produces. A run directory belongs to one experiment: a start that
changes a key with ``Effect.RESULTS`` is refused, unless ``checkpoint.allow_changes`` lists the key.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple, cast, get_type_hints

from gpt4d.config.fields import Effect
from gpt4d.config.schema import Config, ModelConfig
from gpt4d.runtime.errors import ConfigError

model_schemas: dict[str, type[ModelConfig]] = {}  # settings of each model family, by its name

# Remedies for names of other trainers that no key has.
_EXPLAINED = {
    "use parallel.gx, and parallel.gy for a second dimension": "tp tensor_parallel tensor_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree model_parallel_size",
    "use train.micro_batch_size, a device's samples per forward and backward; the rest of train.batch_size is "
    "accumulated": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps grad_acc_steps "
    "accumulate_grad_batches batch_accumulation_per_replica",
    "use optim.min_lr_ratio, a fraction of optim.lr": "min_lr min_learning_rate final_lr lr_min",
    "use optim.warmup_steps, a number of steps": "warmup_ratio warmup_fraction",
    "use optim.beta1 and optim.beta2": "betas",
    "use optim=muon, or optim=adamw with optim.lr and other keys of optim": "optimizer optimizer_name optim.name "
    "optim.type muon",
    "a GPU is used where torch finds one; set the environment variable CUDA_VISIBLE_DEVICES to an empty text for the "
    "CPU": "device",
    "use train.precision=bf16": "bf16 fp16",
    "use train.precision=fp8": "fp8 float8",
    "use logging.trackers=[wandb], and logging.online=true to log to its server": "logging.wandb logging.wandb.mode "
    "wandb use_wandb wandb.mode wandb_mode",
    "use logging.trackers=[tensorboard]": "tensorboard use_tensorboard tensorboard_dir",
    "use logging.trackers=[mlflow]": "mlflow use_mlflow",
    "use data=text data.path='books/*.txt', or another choice of data": "dataset dataset_name",
}
REMEDIES = {name: remedy for remedy, names in _EXPLAINED.items() for name in names.split()}
_ABSENT = object()
_GENERIC = ("name", "kind", "mode", "every")  # say too little for a guess in another group


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Return all keys of a config class, such as ``parallel.gx``."""
    return list(key_types(schema, prefix))


class Setting(NamedTuple):
    """Key, type and field of one setting. ``family``: the model family that has it; empty for settings of all runs."""

    key: str
    type: Any
    field: Field
    family: str = ""


def settings(schema: type = Config, prefix: str = "", family: str = "") -> Iterator[Setting]:
    """Yield all settings of a config class. Several model families may have settings with one key."""
    fields_by_name = {each.name: each for each in fields(schema)}
    for name, kind in get_type_hints(schema).items():
        if fields_by_name[name].metadata.get("derived"):
            continue
        if not is_dataclass(kind):
            yield Setting(prefix + name, kind, fields_by_name[name], family)
        elif kind is ModelConfig and model_schemas:
            for each, group in model_schemas.items():
                yield from settings(group, f"{prefix}{name}.", each)
        else:
            yield from settings(cast(type, kind), f"{prefix}{name}.")


def stated(key: str, fact: str, model: type | None = None) -> list[Any]:
    """Return the values that the fields of a key's groups, outermost first, and of the key have as ``fact``.

    Of the fields in several families, only the field of ``model`` counts, if it is given. The list is empty for a key
    that does not exist.
    """
    found: list[Any] = []
    schemas: list[Any] = [Config]
    for name in key.split("."):
        named = [each for schema in schemas for each in fields(schema) if each.name == name]
        found += [each.metadata[fact] for each in named if each.metadata.get(fact) is not None]
        schemas = [each.type for each in named if is_dataclass(each.type)]
        if ModelConfig in schemas:
            schemas += [model] if model else model_schemas.values()
    return found


def other_names(schema: type = Config) -> dict[str, str]:
    """Return the key of each name that other trainers give to a key."""
    return {name: each.key for each in settings(schema) for name in each.field.metadata.get("aliases", "").split()}


def key_types(schema: type = Config, prefix: str = "") -> dict[str, type]:
    """Return the type of every key of a config class."""
    return {each.key: each.type for each in settings(schema, prefix)}


def groups(schema: type = Config, prefix: str = "") -> dict[str, type]:
    """Return the dataclass of every group of keys of a config class, such as ``parallel.pipeline``."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            found |= {prefix + name: kind, **groups(kind, f"{prefix}{name}.")}
    return found


def meant_key(key: str, schema: type = Config) -> str | None:
    """Return the key for another trainer's name of a setting, or for a key without its group; None if unknown."""
    keys = known_keys(schema)
    key = key.lower().replace("-", "_")
    name = key.rpartition(".")[2]
    renamed = other_names(schema)
    if key in renamed or name in renamed:
        return renamed.get(key) or renamed[name]
    elsewhere = [k for k in keys if k.endswith("." + name)] if name not in _GENERIC else []
    return elsewhere[0] if len(elsewhere) == 1 else None


def unknown_key(key: str, schema: type = Config) -> ConfigError:
    """Return the error for a key that ``schema`` lacks, with the key that is probably meant."""
    keys = known_keys(schema)
    prefix, _, name = key.rpartition(".")
    group = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == prefix}
    similar = difflib.get_close_matches(name, group, n=1)
    if key in keys:  # another model family has this key
        families = [family for family, settings in model_schemas.items() if name in get_type_hints(settings)]
        return ConfigError(f"{key}: the chosen model has no such key; it is one of {' and '.join(families)}")
    if schema is Config and (remedy := REMEDIES.get(key) or REMEDIES.get(name)):
        return ConfigError(f"{key}: there is no such key; {remedy}")
    if similar:
        remedy = f"did you mean {group[similar[0]]}?"
    elif meant := meant_key(key, schema):
        remedy = f"did you mean {meant}?"
    else:
        remedy = f"use one of {', '.join(group or sorted({k.partition('.')[0] + '.…' for k in keys}))}"
    return ConfigError(f"{key}: there is no such key; {remedy}")


class Change(NamedTuple):
    """Values of one key before and after."""

    before: Any
    after: Any


def effect_of(key: str) -> Effect:
    """Return the effect of a key, which its field or a field of its groups states. Raises KeyError if none does.

    All families of gpt4d with a key of a model state one effect, because the recorded settings of a run do not name its
    family. The first registered family counts.
    """
    families = [each for each in model_schemas.values() if key.removeprefix("model.") in each.__dataclass_fields__]
    effects = stated(key, "effect", families[0] if families else None)
    if not effects:
        raise KeyError(key)
    return effects[-1]


def recorded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide a run's results and length, by key. Checkpoints store these settings.

    ``values`` is a configuration as nested dictionaries, such as ``asdict(config)`` or the content of a config.yaml.
    """
    found = {}
    for key in known_keys():
        if effect_of(key) in (Effect.RESULTS, Effect.LENGTH):
            value: Any = values
            for name in key.split("."):
                value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                found[key] = value
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Change]:
    """Return the keys of two ``recorded_settings`` whose values differ. Only keys in both settings are compared."""
    return {key: Change(before[key], after[key]) for key in before if key in after and before[key] != after[key]}


def check_changes(found: Mapping[str, Change], allowed: Collection[str], run: str) -> None:
    """Raise ConfigError if a change alters results and neither its key nor its group is allowed.

    ``run``: the checkpoint or run directory that has the values before the changes.
    """
    refused = [key for key in found if effect_of(key) is Effect.RESULTS and not is_allowed(key, allowed)]
    if refused:
        first, *others = refused
        also = "".join(f", {key}={found[key].after} instead of {found[key].before}" for key in others)
        raise ConfigError(
            f"{first}={found[first].after}: {run} has {found[first].before}{also}; restore the old value"
            f"{'s' if others else ''}, set another run.name, or add checkpoint.allow_changes=[{','.join(refused)}]"
        )


def is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Return whether ``checkpoint.allow_changes`` lists a key or one of its groups."""
    return any(key == entry or key.startswith(f"{entry}.") for entry in allowed)


def check_allowed(allowed: Any) -> None:
    """Raise ConfigError unless ``checkpoint.allow_changes`` lists keys, or groups of keys, that change results."""
    possible = {key for key in known_keys() if effect_of(key) in (Effect.RESULTS, Effect.DATA)}
    groups = {key.rpartition(".")[0] for key in possible}
    for key in allowed:
        if key not in possible | groups:
            raise ConfigError(
                f"checkpoint.allow_changes=[{','.join(allowed)}]: {key} is not a setting that changes results; list "
                "keys such as optim.lr, or groups such as optim or data"
            )
