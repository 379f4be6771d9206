"""Weights and settings of transformers' LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM.

Linear weights are [out, in] in transformers and [in, out] in gpt4d. Queries, keys and values are one weight in gpt4d.
Its columns are stored in pieces of a concatenation (gpt4d.parallel.layers.sharding.interleaved_order). A gated
MLP stores its two halves in the same way.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpt4d.config import ConfigError
from gpt4d.model.hugging_face_settings import (
    TEXT_USAGE,
    check_sizes,
    check_supported,
    transformers_settings,
    unsupported,
)
from gpt4d.model.llama import FAMILY
from gpt4d.model.llama.config import ROPE_SCALINGS, LlamaConfig
from gpt4d.parallel.layers.linear import concatenate, separate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASS, FOLDER, FILE, HAS_TOKENIZER = "transformers.AutoModelForCausalLM", "", "model", True
PIPELINE_TAG, USAGE = "text-generation", TEXT_USAGE
BASE, BUFFERS = "model.", r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

# Settings of transformers that a Llama shares with other families.
SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
)
_NAMES = {
    "tokens.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "head.weight": ["lm_head.weight"],
}
_LAYERS = {
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.output": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}


def names(name: str, config: LlamaConfig) -> list[str]:
    """Return transformers' names: ``blocks.3.mlp.up.weight`` is the weights of layer 3's gate_proj and up_proj."""
    if name in _NAMES:
        return _NAMES[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    assert block, f"{name} is no parameter of a Llama"
    return [f"model.layers.{block[1]}.{layer}.{block[3]}" for layer in _LAYERS[block[2]]]


def copies(config: LlamaConfig) -> dict[str, str]:
    """Return the name of a tied head, because some files contain a copy of the embedding under this name."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {}


def to_hf(name: str, tensor: torch.Tensor, config: LlamaConfig) -> list[torch.Tensor]:
    """Return gpt4d's global tensor in transformers' format, split and transposed."""
    if name == "tokens.weight":
        return [tensor]
    parts = [tensor]
    if ".attention.qkv." in name:
        parts = separate(tensor, config.qkv_channels, config.head_parts)
    elif ".mlp.up." in name:
        parts = list(tensor.unbind(1))
    return [part.t().contiguous() for part in parts]


def from_hf(name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: LlamaConfig) -> torch.Tensor:
    """Return transformers' tensors as gpt4d's global tensor of ``shape``."""
    if name == "tokens.weight":
        return tensors[0]
    parts = [tensor.t() for tensor in tensors]
    if ".attention.qkv." in name:
        return concatenate(parts, config.qkv_channels, config.head_parts)
    if ".mlp.up." in name:
        return torch.stack(parts, 1)
    return parts[0].contiguous()


def documents(config: LlamaConfig, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``config.json``, also with the names of rotary settings that transformers 4 reads."""
    values = dict(source or json.loads(hf_config(config).to_json_string()))
    rope = _rope_parameters(config)
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if config.rope_scaling != "none":
        older["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if source and FAMILY.changed_positions(config_from_hf(config.name, values), config):
        values.pop("original_max_position_embeddings", None)
        values |= {"max_position_embeddings": config.max_positions, "rope_parameters": rope, **older}
    added = {key: value for key, value in older.items() if key not in values}
    if values.get("rope_theta") != rope["rope_theta"]:  # transformers 5 reads it if there is a rope_scaling
        added["rope_theta"] = rope["rope_theta"]
    return {"config.json": values | added}


def hf_config(config: LlamaConfig) -> "PretrainedConfig":
    """Return the transformers configuration of such a model, without ids of special tokens."""
    import transformers

    kind = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    values: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "rope_parameters": _rope_parameters(config),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return getattr(transformers, f"{kind}Config")(**values)


def _rope_parameters(config: LlamaConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling == "none":
        return values
    values |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "linear":
        return values
    values["original_max_position_embeddings"] = config.rope_original_positions
    if config.rope_scaling == "llama3":
        return values | {"low_freq_factor": config.rope_low_frequency, "high_freq_factor": config.rope_high_frequency}
    values |= {"beta_slow": config.rope_beta_slow, "beta_fast": config.rope_beta_fast, "truncate": config.rope_truncate}
    return values | ({"attention_factor": config.rope_attention_factor} if config.rope_attention_factor else {})


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def config_from_hf(source: str, values: dict) -> LlamaConfig:
    """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings."""
    return read_settings(source, transformers_settings(source, values))


def read_settings(source: str, values: Mapping[str, Any], full_attention: bool = True) -> LlamaConfig:
    """Return the settings that a Llama shares with other families.

    Args:
        source: the beginning of messages.
        values: all settings of a family of transformers.
        full_attention: whether all blocks must have the attention and the rotary positions of a Llama.
    """
    kind = values["model_type"]
    required = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0, None),
    }
    check_supported(source, values, required)
    if full_attention and {*(values.get("layer_types") or ())} - {"full_attention"}:
        raise unsupported(source, "layer_types", "…", "full_attention")
    check_sizes(source, {key: values[key] for key in (*_SIZES, "vocab_size", "max_position_embeddings")})
    layers, hidden, heads, key_value_heads, inner = (values[key] for key in _SIZES)
    head_size = values.get("head_dim") or hidden // heads
    check_sizes(source, {"head_dim": head_size})
    if heads % key_value_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads={key_value_heads} does not divide num_attention_heads={heads}; use a model "
            "whose keys and values each serve equally many queries"
        )
    return LlamaConfig(
        name=source,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        inner=inner,
        vocab_size=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        norm_epsilon=values["rms_norm_eps"],
        tied=values["tie_word_embeddings"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        **(_rope_settings(source, values) if full_attention else {}),
    )


def _rope_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings for ``rope_parameters``, into which transformers has converted its older settings."""
    rope = values["rope_parameters"]
    check_supported(source, rope, dict.fromkeys(("mscale", "mscale_all_dim"), (None,)))
    check_supported(source, rope, {"partial_rotary_factor": (1.0, None)})
    kind, settings = rope["rope_type"], {"rope_theta": float(rope["rope_theta"])}
    if kind == "default":
        return settings
    if kind not in ROPE_SCALINGS[1:]:
        raise unsupported(source, "rope_type", kind, "default, linear, llama3 or yarn")
    if kind == "linear":
        return settings | {"rope_scaling": kind, "rope_factor": float(rope["factor"])}
    original = rope["original_max_position_embeddings"]
    factor = values["max_position_embeddings"] / original if rope["factor"] is None else rope["factor"]
    settings |= {"rope_scaling": kind, "rope_factor": float(factor), "rope_original_positions": original}
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return settings | {"rope_low_frequency": low, "rope_high_frequency": high}
    if rope.get("attention_factor") == 0:
        raise unsupported(source, "attention_factor", 0, "a number above 0")
    ours = {key: f"rope_{key}" for key in ("beta_slow", "beta_fast", "attention_factor")}
    settings |= {ours[key]: float(rope[key]) for key in ours if rope.get(key) is not None}
    return settings | {"rope_truncate": bool(rope.get("truncate", True))}
