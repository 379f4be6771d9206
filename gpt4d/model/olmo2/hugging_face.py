"""Weights and settings of transformers' Olmo2ForCausalLM, which differs from a Llama in the names of the norms."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from gpt4d.model.hugging_face_settings import check_supported, transformers_settings
from gpt4d.model.llama import hugging_face as llama
from gpt4d.model.olmo2.config import Olmo2Config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASS, FOLDER, FILE, HAS_TOKENIZER = llama.CLASS, llama.FOLDER, llama.FILE, llama.HAS_TOKENIZER
PIPELINE_TAG, USAGE, BASE, BUFFERS = llama.PIPELINE_TAG, llama.USAGE, llama.BASE, llama.BUFFERS

_NORMS = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}


def names(name: str, config: Olmo2Config) -> list[str]:
    """Return transformers' names of gpt4d's parameter ``name``."""
    norm = re.fullmatch(r"blocks\.(\d+)\.(attention_norm|mlp_norm)\.weight", name)
    return [f"model.layers.{norm[1]}.{_NORMS[norm[2]]}.weight"] if norm else llama.names(name, config.llama)


def copies(config: Olmo2Config) -> dict[str, str]:
    """Return no names, because the head is not tied."""
    return {}


def to_hf(name: str, tensor: torch.Tensor, config: Olmo2Config) -> list[torch.Tensor]:
    """Return gpt4d's global tensor in transformers' format."""
    return llama.to_hf(name, tensor, config.llama)


def from_hf(name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: Olmo2Config) -> torch.Tensor:
    """Return transformers' tensors as gpt4d's global tensor of ``shape``."""
    return llama.from_hf(name, tensors, shape, config.llama)


def documents(config: Olmo2Config, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``config.json``, also with the names of rotary settings that transformers 4 reads."""
    return llama.documents(config.llama, source or json.loads(hf_config(config).to_json_string()))


def hf_config(config: Olmo2Config) -> "PretrainedConfig":
    """Return the transformers configuration of such a model, without ids of special tokens."""
    import transformers

    values = llama.hf_config(config.llama).to_dict()
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings = {key: values[key] for key in llama.SETTINGS} | no_tokens
    return transformers.Olmo2Config(architectures=["Olmo2ForCausalLM"], **settings)


def config_from_hf(source: str, values: dict) -> Olmo2Config:
    """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings."""
    values = transformers_settings(source, values)
    check_supported(source, values, {"tie_word_embeddings": (False,)})
    found = llama.read_settings(source, values)
    return Olmo2Config(**{field.name: getattr(found, field.name) for field in fields(Olmo2Config)})
