"""Models of text under the names and shapes of transformers: one table per kind of model, and the code that reads it.

gpt4d concatenates queries, keys and values, and the two halves of a gated MLP. Columns of queries, keys and values are
stored in pieces (gpt4d.parallel.layers.sharding.interleaved_order). Experts of a block are one tensor.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from gpt4d.config import ConfigError, ModelConfig
from gpt4d.config.fields import LARGEST_COUNT, LARGEST_SIZE
from gpt4d.model.text import positions_of
from gpt4d.parallel.layers.linear import concatenate, separate
from gpt4d.parallel.lazy import torch
from gpt4d.runtime.errors import one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # kinds of layers with rotary positions of their own


@dataclass(frozen=True)
class ModelTable:
    """The names of one kind of model, the ``model_type`` of transformers.

    Attributes:
        architecture: name of the class.
        layers: transformers' names of gpt4d's layers, separated by spaces. ``*`` stands for the index of an expert.
            ``blocks`` is the prefix of the layers of a block. A name with ``weight`` is the name of a tensor.
        settings: gpt4d's setting for each setting of transformers. The last of several equal ones is read.
        fixed: values of gpt4d's settings that all models of this kind have.
        supported: supported values of transformers' settings without a setting of gpt4d.
    """

    architecture: str
    layers: Mapping[str, str]
    settings: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, Sequence] = field(default_factory=dict)


@dataclass
class TextAdapter:
    """Converts a family's weights and settings by its tables. It implements ``HuggingFaceAdapter``.

    Attributes:
        config: the dataclass of the family's settings.
        kinds: the tables by ``model_type``.
        read: returns gpt4d's settings that are in no table, from the beginning of messages and transformers' settings.
        write: returns transformers' settings that are in no table.
        rows_first: whether linear weights are [in, out] as in gpt4d, with a concatenation of queries, keys and values.

    All further attributes are those of ``HuggingFaceAdapter``.
    """

    config: type[ModelConfig]
    kinds: Mapping[str, ModelTable]
    read: Callable[[str, Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    rows_first: bool = False
    BASE: str = "model."

    CLASS: str = "transformers.AutoModelForCausalLM"
    PIPELINE_TAG: str = "text-generation"
    USAGE: str = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""
    FOLDER: str = ""
    FILE: str = "model"
    BUFFERS: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    HAS_TOKENIZER: bool = True

    def names(self, name: str, config: Any) -> list[str]:
        """Return transformers' names: ``blocks.3.mlp.up.weight`` is the weights of layer 3's gate_proj and up_proj."""
        layers = self.kinds[self._kind(config)].layers
        *block, layer = re.split(r"(?<=^blocks)(\.\d+\.)", name)
        prefix, suffix = f"{layers['blocks']}{block[1]}" if block else "", ""
        if layer not in layers:
            layer, dot, kind = layer.rpartition(".")
            suffix = dot + kind
        experts = range(config.experts) if "*" in layers[layer] else range(1)
        return [f"{prefix}{each.replace('*', str(i))}{suffix}" for i in experts for each in layers[layer].split()]

    def copies(self, config: Any) -> dict[str, str]:
        """Return the name of a tied head, because some files contain a copy of the embedding under this name."""
        return {"lm_head.weight": self.names("tokens.weight", config)[0]} if config.tied else {}

    def to_hf(self, name: str, tensor: torch.Tensor, config: Any) -> list[torch.Tensor]:
        """Return gpt4d's global tensor in transformers' format: one tensor for each of ``names``."""
        if name.endswith(".router.state"):
            return []
        if self.rows_first:
            return [tensor.flatten(-2) if ".qkv." in name else tensor]
        if name == "tokens.weight":
            return [tensor]
        parts = [*tensor] if ".experts." in name else [tensor]
        if ".qkv." in name:
            parts = separate(tensor, config.qkv_channels, config.head_parts)
        elif name.endswith((".up", ".up.weight")):
            parts = [half for part in parts for half in part.unbind(1)]
        return [part.t().contiguous() for part in parts]

    def from_hf(self, name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: Any) -> torch.Tensor:
        """Return transformers' tensors as gpt4d's global tensor of ``shape``. Routers begin with an equal load."""
        if name.endswith(".router.state"):
            return torch.full(shape, config.experts_per_token / config.experts if config.balance == "loss" else 0.0)
        if self.rows_first or name == "tokens.weight":
            return tensors[0].reshape(shape)
        parts = [tensor.t() for tensor in tensors]
        if ".qkv." in name:
            return concatenate(parts, config.qkv_channels, config.head_parts)
        stacked = torch.stack(parts)
        if name.endswith((".up", ".up.weight")):
            stacked = stacked.unflatten(0, (-1, 2)).transpose(1, 2)
        return stacked.reshape(shape).contiguous()

    def documents(self, config: Any, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return ``config.json``, also with the names of rotary settings that transformers 4 reads."""
        values = dict(source or json.loads(self.hf_config(config).to_json_string()))
        rope = self.write(config).get("rope_parameters")
        if rope is None:
            return {"config.json": values}
        older = _older_names(rope)
        if source:
            before = self.config_from_hf(config.name, values)
            if any(getattr(before, key) != getattr(config, key) for key in positions_of(self.config)):
                values.pop("original_max_position_embeddings", None)
                values |= {"max_position_embeddings": config.max_positions, "rope_parameters": rope, **older}
        added = {key: value for key, value in older.items() if key not in values}
        if values.get("rope_theta") != older["rope_theta"]:  # transformers 5 reads it if there is a rope_scaling
            added["rope_theta"] = older["rope_theta"]
        return {"config.json": values | added}

    def hf_config(self, config: Any) -> PretrainedConfig:
        """Return the transformers configuration of such a model, without ids of special tokens.

        Raises ConfigError if transformers has no such model.
        """
        from transformers import CONFIG_MAPPING

        kind = self._kind(config)
        table = self.kinds[kind]
        for key, value in table.fixed.items():
            if getattr(config, key) != value:
                raise ConfigError(
                    f"model.{key}={getattr(config, key)}: transformers has no such model; only models with "
                    f"model.{key}={value} have this format"
                )
        values = {theirs: getattr(config, ours) for theirs, ours in table.settings.items()} | self.write(config)
        values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return CONFIG_MAPPING[kind](architectures=[table.architecture], **values)

    def config_from_hf(self, source: str, values: dict) -> Any:
        """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings."""
        values = transformers_settings(source, values)
        table, hints = self.kinds[values["model_type"]], get_type_hints(self.config)
        fixed = {theirs: (table.fixed[ours],) for theirs, ours in table.settings.items() if ours in table.fixed}
        check_supported(source, values, {**table.supported, **fixed})
        read = {ours: theirs for theirs, ours in table.settings.items()}
        sizes = [theirs for ours, theirs in read.items() if hints.get(ours) in (int, int | None)]
        check_sizes(source, {theirs: values[theirs] for theirs in sizes})
        found = {ours: values[theirs] for ours, theirs in read.items()} | dict(table.fixed) | self.read(source, values)
        own = {each.name for each in fields(self.config)}  # the class has the remaining ones as attributes
        assert all(key in own or hasattr(self.config, key) for key in found), found
        return self.config(name=source, **{key: value for key, value in found.items() if key in own})

    def _kind(self, config: Any) -> str:
        """Return the ``model_type`` whose fixed settings the model has, or the most similar one."""

        def differences(kind: str) -> int:
            return sum(getattr(config, key) != value for key, value in self.kinds[kind].fixed.items())

        return min(self.kinds, key=differences)


def _older_names(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` under the names that transformers 4 reads."""
    local = {"rope_local_base_freq": rope[LOCAL]["rope_theta"]} if LOCAL in rope else {}
    rope = rope.get(GLOBAL, rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scales = rope["rope_type"] != "default"
    return {"rope_theta": rope["rope_theta"], **local, "rope_scaling": scaling if scales else None}


# Settings that transformers reads for each kind of model, although its configurations do not declare them.
_ABSENT = "per_layer_config", "attribute_map", "configuration_files", "transformers_weights", "fusion_config"
_EVERY_FAMILY: dict[str, tuple] = {"is_causal": (True,), **dict.fromkeys(_ABSENT, (None,))}


def transformers_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a ``config.json`` as transformers reads them.

    The library supplies the values of absent keys, and chooses between an older and a newer key for one setting.
    Raises ConfigError for values that it rejects.
    """
    from transformers import CONFIG_MAPPING, logging

    check_supported(source, values, _EVERY_FAMILY)
    for key in {"num_hidden_layers", "n_layer"} & values.keys():  # The library makes a list of the layers.
        check_sizes(source, {key: values[key]}, LARGEST_COUNT)
    given = {key: value for key, value in values.items() if key != "num_labels"}  # nor a list of the classes
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # It prints the complete configuration.
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(given))
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()  # as the library does once more before it computes the frequencies
        return config.to_dict()
    except Exception as error:  # The type depends on the value.
        raise ConfigError(
            f"{source}: config.json has an invalid value ({one_line(error)}); correct that file"
        ) from None
    finally:
        logging.set_verbosity(verbosity)


def unsupported(source: str, key: str, value: object, supported: object, file: str = "config.json") -> ConfigError:
    """Return the error for a setting that gpt4d computes differently."""
    return ConfigError(f"{source}: {key}={value!r:.80} in {file} is not supported; use a model with {key}={supported}")


def check_supported(source: str, values: Mapping, choices: Mapping[str, Sequence], file: str = "config.json") -> None:
    """Raise ConfigError unless each of some settings is missing or has one of its ``choices``."""
    for key, supported in choices.items():
        if values.get(key, supported[0]) not in supported:
            raise unsupported(source, key, values[key], repr(supported[0]), file)


def check_sizes(source: str, sizes: Mapping[str, object], at_most: int = LARGEST_SIZE) -> None:
    """Raise ConfigError unless all sizes are integers from 1 to ``at_most``."""
    for key, size in sizes.items():
        if type(size) is not int or not 1 <= size <= at_most:
            raise ConfigError(
                f"{source}: {key}={size!r:.80} in config.json is not a size; use a number from 1 to {at_most:,}"
            )
