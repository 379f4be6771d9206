"""Weights and settings of transformers' OlmoeForCausalLM, Qwen3MoeForCausalLM and MixtralForCausalLM.

Their files have one tensor for each matrix of each expert. Attention and norms have the names of a Llama's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from gpt4d.config import ConfigError
from gpt4d.model.hugging_face_settings import check_sizes, check_supported, transformers_settings
from gpt4d.model.llama import hugging_face as llama
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.moe.config import MoeConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASS, FOLDER, FILE, HAS_TOKENIZER = llama.CLASS, llama.FOLDER, llama.FILE, llama.HAS_TOKENIZER
PIPELINE_TAG, USAGE, BASE, BUFFERS = llama.PIPELINE_TAG, llama.USAGE, llama.BASE, llama.BUFFERS

# Kinds of models by model.qk_norm, and the names of their layers.
_KINDS = {"all": "Olmoe", "heads": "Qwen3Moe", "none": "Mixtral"}
_TYPES = {"olmoe": "all", "qwen3_moe": "heads", "mixtral": "none"}
_PROJECTIONS = {"up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_MIXTRAL_PROJECTIONS = {"up": ("w1", "w3"), "down": ("w2",)}
_MIXTURE = re.compile(r"blocks\.(\d+)\.mlp\.(router\.weight|router\.state|experts\.up|experts\.down)")


def names(name: str, config: MoeConfig) -> list[str]:
    """Return transformers' names: ``blocks.3.mlp.experts.up`` has the weights gate_proj and up_proj of each expert."""
    found = _MIXTURE.fullmatch(name)
    if not found:
        return llama.names(name, config.llama)
    mixtral = config.qk_norm == "none"
    layer = f"model.layers.{found[1]}.{'block_sparse_moe' if mixtral else 'mlp'}"
    if found[2] == "router.state":
        return []
    if found[2] == "router.weight":
        return [f"{layer}.gate.weight"]
    matrices = (_MIXTRAL_PROJECTIONS if mixtral else _PROJECTIONS)[found[2].removeprefix("experts.")]
    return [f"{layer}.experts.{expert}.{matrix}.weight" for expert in range(config.experts) for matrix in matrices]


def copies(config: MoeConfig) -> dict[str, str]:
    """Return the name of a tied head, because some files contain a copy of the embedding under this name."""
    return llama.copies(config.llama)


def to_hf(name: str, tensor: torch.Tensor, config: MoeConfig) -> list[torch.Tensor]:
    """Return gpt4d's global tensor in transformers' format, one matrix for each of ``names``."""
    if name.endswith("router.state"):
        return []
    if name.endswith("experts.up"):
        return [matrix.t().contiguous() for expert in tensor for matrix in expert.unbind(1)]
    if name.endswith("experts.down"):
        return [expert.t().contiguous() for expert in tensor]
    return llama.to_hf(name, tensor, config.llama)


def from_hf(name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: MoeConfig) -> torch.Tensor:
    """Return transformers' tensors as gpt4d's global tensor of ``shape``. Routers begin with an equal load."""
    if name.endswith("router.state"):
        value = config.experts_per_token / config.experts if config.balance == "loss" else 0.0
        return torch.full(shape, value)
    if name.endswith("experts.up"):
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return torch.stack([torch.stack((gate.t(), up.t()), 1) for gate, up in pairs])
    if name.endswith("experts.down"):
        return torch.stack([matrix.t() for matrix in tensors])
    return llama.from_hf(name, tensors, shape, config.llama)


def documents(config: MoeConfig, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``config.json``, also with the names of rotary settings that transformers 4 reads."""
    return llama.documents(config.llama, source or json.loads(hf_config(config).to_json_string()))


def hf_config(config: MoeConfig) -> "PretrainedConfig":
    """Return the transformers configuration of such a model, without ids of special tokens.

    Raises ConfigError if transformers has no such model.
    """
    import transformers

    kind = _KINDS[config.qk_norm]
    differences = {
        "shared_inner": (config.shared_inner, 0),
        "router": (config.router, "softmax"),
        "balance": (config.balance, "loss"),
    }
    if kind == "Mixtral":
        differences["normalized_weights"] = (config.normalized_weights, True)
    for key, (value, supported) in differences.items():
        if value != supported:
            raise ConfigError(
                f"model.{key}={value}: transformers has no such model; only models with model.{key}={supported} have "
                "this format"
            )
    values = llama.hf_config(config.llama).to_dict()
    settings = {key: values[key] for key in llama.SETTINGS} | dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )
    settings |= {"num_experts_per_tok": config.experts_per_token, "router_aux_loss_coef": config.balance_rate}
    if kind == "Mixtral":
        settings["num_local_experts"] = config.experts
    else:
        settings |= {"num_experts": config.experts, "norm_topk_prob": config.normalized_weights}
    if kind == "Qwen3Moe":
        settings["moe_intermediate_size"] = config.inner
    return getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **settings)


def config_from_hf(source: str, values: dict) -> MoeConfig:
    """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings."""
    values = transformers_settings(source, values)
    kind = values["model_type"]
    required: dict[str, Sequence] = {"clip_qkv": (None,), "sliding_window": (None,), "router_jitter_noise": (0,)}
    check_supported(source, values, required | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)})
    experts = values["num_local_experts" if "num_local_experts" in values else "num_experts"]
    check_sizes(source, {"num_experts": experts, "num_experts_per_tok": values["num_experts_per_tok"]})
    inner = values["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
    found = llama.read_settings(source, values | {"intermediate_size": inner})
    shared = {field.name for field in fields(MoeConfig)} & {field.name for field in fields(LlamaConfig)} - {"qk_norm"}
    return MoeConfig(
        **{key: getattr(found, key) for key in shared},
        experts=experts,
        experts_per_token=values["num_experts_per_tok"],
        normalized_weights=kind == "mixtral" or values["norm_topk_prob"],
        balance_rate=float(values["router_aux_loss_coef"]),
        qk_norm=_TYPES[kind],
    )
