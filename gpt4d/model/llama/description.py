"""Llama, Qwen2 and Qwen3 without torch: layers in the order of execution, what the grid must divide, FLOPs."""

from gpt4d.config import Divisibility
from gpt4d.model.attention_costs import GroupedAttentionCost, RotaryCost
from gpt4d.model.costs import CrossEntropyCost, GatedCost, RMSNormCost, TokenEmbeddingCost
from gpt4d.model.description import STREAM, Description, Unit, residual_stream
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ResidualBlock


def describe(config: LlamaConfig) -> Description:
    """Return the description of a Llama, a Qwen2 or a Qwen3."""
    h, attended, parts = config.hidden, config.heads * config.head_size, config.head_parts
    columns, vocabulary = sum(config.qkv_channels), config.padded_vocab_size
    norms = ("attention.q_norm", "attention.k_norm") if config.qk_norm else ()
    attention_norm, mlp_norm = RMSNormCost("attention_norm", h), RMSNormCost("mlp_norm", h)
    gate, norm = GatedCost(config.inner), RMSNormCost("norm", h, branch=False)
    block = ResidualBlock(
        branches=(
            (
                attention_norm,
                LinearCost("attention.qkv", h, columns, bias=config.qkv_bias, heads=parts, source=attention_norm),
                GroupedAttentionCost(config.heads, config.key_value_heads, config.head_size, parts, norms),
                LinearCost("attention.output", attended, h, transposed=True, bias=False, heads=parts),
            ),
            (
                mlp_norm,
                LinearCost("mlp.up", h, config.inner, num_fused=2, bias=False, source=mlp_norm),
                gate,
                LinearCost("mlp.down", config.inner, h, transposed=True, bias=False, source=gate),
            ),
        ),
        features=h,
    )
    tied = "tokens.weight" if config.tied else None
    head = LinearCost("head", h, vocabulary, bias=False, tied=tied, source=norm, used=config.vocab_size)
    return Description(
        units=(
            Unit("", TokenEmbeddingCost("tokens", vocabulary, h, config.vocab_size)),
            Unit("", RotaryCost(config.head_size)),
            *(Unit(f"blocks.{index}", block, block=True) for index in range(config.layers)),
            Unit("", norm),
            Unit("", head),
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
