"""Weights under the names and shapes of transformers' GPT2LMHeadModel, and its settings.

Its linear weights are stored [in, out] as in gpt4d. Only queries, keys and values differ: transformers concatenates
them, and gpt4d stores them along a separate dim.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpt4d.config import ConfigError
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.hugging_face_settings import TEXT_USAGE, check_sizes, check_supported, transformers_settings

if TYPE_CHECKING:
    from transformers import GPT2Config as HuggingFaceConfig

CLASS, FOLDER, FILE, HAS_TOKENIZER = "transformers.AutoModelForCausalLM", "", "model", True
PIPELINE_TAG, USAGE = "text-generation", TEXT_USAGE
BASE, BUFFERS = "transformer.", r"transformer\.h\.\d+\.attn\.(masked_)?bias"

_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def names(name: str, config: GPT2Config) -> list[str]:
    """Return transformers' name: ``blocks.3.attention.qkv.weight`` is ``transformer.h.3.attn.c_attn.weight``."""
    if name in _NAMES:
        return [_NAMES[name]]
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name):
        return [f"{_NAMES['blocks']}.{block[1]}.{_NAMES[block[2]]}.{block[3]}"]
    layer, _, kind = name.rpartition(".")
    return [f"{_NAMES[layer]}.{kind}"]


def copies(config: GPT2Config) -> dict[str, str]:
    """Return the name of the tied head, because some files contain a copy of the embedding under this name."""
    return {"lm_head.weight": "transformer.wte.weight"}


def documents(config: GPT2Config, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``config.json``."""
    return {"config.json": dict(source or json.loads(hf_config(config).to_json_string()))}


def hf_config(config: GPT2Config) -> "HuggingFaceConfig":
    """Return the transformers configuration of such a model, without ids of special tokens."""
    from transformers import GPT2Config as HuggingFaceConfig

    assert config.vocab_size, "gpt4d.data.completion has not completed the settings"

    return HuggingFaceConfig(
        architectures=["GPT2LMHeadModel"],
        vocab_size=config.vocab_size,
        n_positions=config.max_positions,
        n_embd=config.hidden,
        n_layer=config.layers,
        n_head=config.heads,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.norm_epsilon,
        bos_token_id=None,
        eos_token_id=None,
    )


def config_from_hf(source: str, values: dict) -> GPT2Config:
    """Return gpt4d's settings for a GPT-2's ``config.json``. Raises ConfigError for unsupported settings."""
    values = transformers_settings(source, values)
    required = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * values["n_embd"]),
        "embd_pdrop": (values["resid_pdrop"],),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    check_supported(source, values, required)
    sizes = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
    check_sizes(source, {key: values[key] for key in sizes})
    if values["n_embd"] % values["n_head"]:
        raise ConfigError(
            f"{source}: n_head={values['n_head']} does not divide n_embd={values['n_embd']}; "
            "use a model whose heads have equal sizes"
        )
    return GPT2Config(
        name=source,
        layers=values["n_layer"],
        hidden=values["n_embd"],
        heads=values["n_head"],
        vocab_size=values["vocab_size"],
        max_positions=values["n_positions"],
        dropout=values["resid_pdrop"],
        attention_dropout=values["attn_pdrop"],
        norm_epsilon=values["layer_norm_epsilon"],
    )


def to_hf(name: str, tensor: torch.Tensor, config: GPT2Config) -> list[torch.Tensor]:
    """Return gpt4d's global tensor in transformers' format, with concatenated queries, keys and values."""
    if ".attention.qkv." in name:
        return [tensor.flatten(-2)]
    return [tensor]


def from_hf(name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: GPT2Config) -> torch.Tensor:
    """Return transformers' tensor as gpt4d's global tensor of ``shape``."""
    (tensor,) = tensors
    return tensor.reshape(shape)
