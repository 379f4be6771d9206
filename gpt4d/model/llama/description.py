"""Llama, Qwen2 and Qwen3 without torch: layers in the order of execution, what the grid must divide, FLOPs."""

from typing import NamedTuple

from gpt4d.config import Divisibility
from gpt4d.model.attention_costs import GroupedAttentionCost, RotaryCost
from gpt4d.model.costs import CrossEntropyCost, GatedCost, RMSNormCost, TokenEmbeddingCost
from gpt4d.model.description import STREAM, Description, Unit, residual_stream
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ResidualBlock
from gpt4d.model.text_config import head, token_embedding
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.norm import HeadNormSpec, RMSNormSpec


class BlockSpecs(NamedTuple):
    """The layers of a block that have parameters."""

    norm: RMSNormSpec  # before the attention, and before the MLP
    qkv: LinearSpec
    head_norm: HeadNormSpec | None  # of queries, and of keys
    output: LinearSpec
    up: LinearSpec
    down: LinearSpec


def block_specs(config: LlamaConfig) -> BlockSpecs:
    """Return the specs of the layers of each block."""
    h, parts, residual_std = config.hidden, config.head_parts, 0.02 / (2 * config.layers) ** 0.5  # as GPT-2's
    attended = config.heads * config.head_size
    return BlockSpecs(
        norm=final_norm(config),
        qkv=LinearSpec(h, sum(config.qkv_channels), bias=config.qkv_bias, heads=parts),
        head_norm=HeadNormSpec(config.head_size, parts, config.norm_epsilon) if config.qk_norm else None,
        output=LinearSpec(attended, h, transposed=True, bias=False, std=residual_std, heads=parts),
        up=LinearSpec(h, config.inner, num_fused=2, bias=False),
        down=LinearSpec(config.inner, h, transposed=True, bias=False, std=residual_std),
    )


def final_norm(config: LlamaConfig) -> RMSNormSpec:
    """Return the spec of the norm before the head."""
    return RMSNormSpec(config.hidden, config.norm_epsilon)


def describe(config: LlamaConfig) -> Description:
    """Return the description of a Llama, a Qwen2 or a Qwen3."""
    h, attended, parts, specs = config.hidden, config.heads * config.head_size, config.head_parts, block_specs(config)
    vocabulary = config.padded_vocab_size
    norms = (("attention.q_norm", specs.head_norm), ("attention.k_norm", specs.head_norm)) if specs.head_norm else ()
    attention_norm, mlp_norm = RMSNormCost("attention_norm", specs.norm), RMSNormCost("mlp_norm", specs.norm)
    gate, norm = GatedCost(config.inner), RMSNormCost("norm", final_norm(config), branch=False)
    block = ResidualBlock(
        branches=(
            (
                attention_norm,
                LinearCost("attention.qkv", specs.qkv, source=attention_norm),
                GroupedAttentionCost(config.heads, config.key_value_heads, config.head_size, parts, norms),
                LinearCost("attention.output", specs.output),
            ),
            (
                mlp_norm,
                LinearCost("mlp.up", specs.up, source=mlp_norm),
                gate,
                LinearCost("mlp.down", specs.down, source=gate),
            ),
        ),
        features=h,
    )
    tied = "tokens.weight" if config.tied else None
    return Description(
        units=(
            Unit("", TokenEmbeddingCost("tokens", token_embedding(config))),
            Unit("", RotaryCost(config.head_size)),
            *(Unit(f"blocks.{index}", block, block=True) for index in range(config.layers)),
            Unit("", norm),
            Unit("", LinearCost("head", head(config), tied=tied, source=norm)),
            Unit("", CrossEntropyCost(vocabulary)),
        ),
        rules=(
            Divisibility("model.heads", config.heads, ("x",)),
            Divisibility("model.key_value_heads·head_size", config.key_value_heads * config.head_size, ("x",)),
            Divisibility("model.hidden", h, ("y", "z")),
            Divisibility("model.heads·head_size", attended, ("x", "z")),
            Divisibility("model.inner", config.inner, ("x", "z")),
        ),
        tensors={STREAM: residual_stream(h)},
        model_flops=lambda samples, length: _model_flops(config, samples, length),
    )


def _model_flops(config: LlamaConfig, samples: int, length: int) -> float:
    """Return the FLOPs of one training step, forward and backward, recomputation not counted.

    Six for each weight of a product and token, and those of attention to all positions, as for GPT-2.
    """
    attended = config.heads * config.head_size
    weights = config.hidden * (sum(config.qkv_channels) + attended + 3 * config.inner)
    per_token = config.layers * (6 * weights + 12 * length * attended) + 6 * config.hidden * config.padded_vocab_size
    return samples * length * per_token
