"""Weights and settings of transformers' Gemma3ForCausalLM, which differs from a Llama in norms and attention."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gpt4d.model.gemma3 import FAMILY
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.hugging_face_settings import check_sizes, check_supported, transformers_settings, unsupported
from gpt4d.model.llama import hugging_face as llama
from gpt4d.model.llama.config import LlamaSizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASS, FOLDER, FILE, HAS_TOKENIZER = llama.CLASS, llama.FOLDER, llama.FILE, llama.HAS_TOKENIZER
PIPELINE_TAG, USAGE, BASE, BUFFERS = llama.PIPELINE_TAG, llama.USAGE, llama.BASE, llama.BUFFERS
copies, to_hf, from_hf = llama.copies, llama.to_hf, llama.from_hf

_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def names(name: str, config: Gemma3Config) -> list[str]:
    """Return transformers' names of gpt4d's parameter ``name``."""
    norm = re.fullmatch(rf"blocks\.(\d+)\.({'|'.join(_NORMS)})\.weight", name)
    return [f"model.layers.{norm[1]}.{_NORMS[norm[2]]}.weight"] if norm else llama.names(name, config.llama)


def documents(config: Gemma3Config, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``config.json``, also with the names of rotary settings that transformers 4 reads."""
    values = dict(source or json.loads(hf_config(config).to_json_string()))
    scaling = {"rope_type": "linear", "factor": config.rope_linear_factor} if config.rope_linear_factor != 1 else None
    older = {
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.rope_local_theta,
        "rope_scaling": scaling,
    }
    if source and FAMILY.changed_positions(config_from_hf(config.name, values), config):
        values |= {
            "max_position_embeddings": config.max_positions,
            "rope_parameters": _rope_parameters(config),
            **older,
        }
    return {"config.json": values | {key: value for key, value in older.items() if key not in values}}


def hf_config(config: Gemma3Config) -> "PretrainedConfig":
    """Return the transformers configuration of such a model, without ids of special tokens."""
    from transformers import Gemma3TextConfig

    of_llama = llama.hf_config(config.llama).to_dict()
    values = {key: value for key, value in of_llama.items() if key in Gemma3TextConfig.__annotations__} | {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": config.window,
        "layer_types": _layer_types(config.global_blocks),
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "rope_parameters": _rope_parameters(config),
    }
    return Gemma3TextConfig(**values)


def _rope_parameters(config: Gemma3Config) -> dict[str, dict[str, Any]]:
    everywhere: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_linear_factor != 1:
        everywhere |= {"rope_type": "linear", "factor": config.rope_linear_factor}
    return {_GLOBAL: everywhere, _LOCAL: {"rope_type": "default", "rope_theta": config.rope_local_theta}}


def _layer_types(global_blocks: Sequence[bool]) -> list[str]:
    return [_GLOBAL if is_global else _LOCAL for is_global in global_blocks]


def config_from_hf(source: str, values: dict) -> Gemma3Config:
    """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings."""
    values = transformers_settings(source, values)
    required = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (False, None),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
    }
    check_supported(source, values, required)
    check_sizes(source, {key: values[key] for key in ("sliding_window", "query_pre_attn_scalar")})
    found = llama.read_settings(source, values, full_attention=False)
    config = Gemma3Config(
        **{field.name: getattr(found, field.name) for field in fields(LlamaSizes)},
        **_rope_settings(source, values["rope_parameters"]),
        window=values["sliding_window"],
        global_every=_global_every(values["layer_types"]),
        query_pre_attn_scalar=values["query_pre_attn_scalar"],
    )
    if values["layer_types"] != _layer_types(config.global_blocks):
        raise unsupported(source, "layer_types", "…", f"{_GLOBAL} in every {config.global_every}th layer only")
    return config


def _global_every(types: Sequence[str]) -> int:
    """Return the distance of global blocks; a value above the number of blocks if no block is global."""
    return types.index(_GLOBAL) + 1 if _GLOBAL in types else len(types) + 1


def _rope_settings(source: str, parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return gpt4d's settings for ``rope_parameters``, into which transformers has converted its older settings."""
    everywhere, local = parameters[_GLOBAL], parameters[_LOCAL]
    for rope, kinds in ((everywhere, ("default", "linear")), (local, ("default",))):
        check_supported(source, rope, {"rope_type": kinds, "partial_rotary_factor": (1.0, None)})
    linear = everywhere.get("rope_type") == "linear"
    return {
        "rope_theta": float(everywhere["rope_theta"]),
        "rope_linear_factor": float(everywhere["factor"]) if linear else 1.0,
        "rope_local_theta": float(local["rope_theta"]),
    }
