"""Models of transformers in directories, with a tokenizer as they come from elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, models

from gpt4d.model import registry
from gpt4d.model.gemma3 import Gemma3Config
from gpt4d.model.llama import LlamaConfig
from gpt4d.model.moe import MoeConfig
from gpt4d.model.olmo2 import Olmo2Config

_SIZES = {
    "layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "head_size": 8, "inner": 48, "vocab_size": 50,
    "max_positions": 64,
}  # fmt: skip
MODEL = LlamaConfig(name="source", norm_epsilon=1e-6, **_SIZES)
LLAMA3 = replace(MODEL, tied=False, rope_theta=5e5, rope_scaling="llama3", rope_factor=8.0, rope_original_positions=16)
QWEN2 = replace(MODEL, qkv_bias=True, rope_scaling="linear", rope_factor=2.0)
YARN = replace(MODEL, qk_norm=True, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=16)
OLMO2 = Olmo2Config(rope_scaling="yarn", rope_factor=4.0, rope_original_positions=16, **_SIZES)
GEMMA3 = Gemma3Config(
    **{**_SIZES, "layers": 3}, window=7, global_every=2, query_pre_attn_scalar=9, rope_theta=1e5,
    rope_linear_factor=8.0, rope_local_theta=1e3,
)  # fmt: skip
MIXTRAL = MoeConfig(experts=5, norm_epsilon=1e-5, balance_rate=0.02, **_SIZES)
OLMOE = replace(MIXTRAL, qk_norm="all", normalized_weights=False, key_value_heads=4, experts_per_token=3)
QWEN3_MOE = replace(MIXTRAL, qk_norm="heads", experts_per_token=1, inner=16, tied=True)
TOKENIZER_FILES = {
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "w1", '
    b'"unk_token": "w0"}',
    "special_tokens_map.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
}


def save(directory: Path, config, max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> None:
    """Save a random model of transformers with a tokenizer as it comes from elsewhere."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = registry.of(config).hugging_face().hf_config(config)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    words = {f"w{index}": index for index in range(49)} | {"</s>": 49}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["w0", "w1", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in TOKENIZER_FILES.items():
        (directory / name).write_bytes(content)


def change_config(directory: Path, **values: object) -> None:
    """Change settings of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
