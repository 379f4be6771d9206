"""GPT-2 without torch: layers in the order of execution, what the grid must divide, FLOPs."""

from typing import NamedTuple

from gpt4d.config import Divisibility
from gpt4d.model.attention_costs import AttentionCost
from gpt4d.model.costs import (
    ActivationCost,
    CrossEntropyCost,
    LayerNormCost,
    PositionEmbeddingCost,
    TokenEmbeddingCost,
)
from gpt4d.model.description import STREAM, Description, Unit, residual_stream
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ResidualBlock
from gpt4d.model.text_config import head, token_embedding
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.norm import LayerNormSpec


class BlockSpecs(NamedTuple):
    """The layers of a block that have parameters."""

    norm: LayerNormSpec  # before the attention, and before the MLP
    qkv: LinearSpec
    output: LinearSpec
    up: LinearSpec
    down: LinearSpec


def block_specs(config: GPT2Config) -> BlockSpecs:
    """Return the specs of the layers of each block."""
    h, inner, heads = config.hidden, 4 * config.hidden, config.heads
    # 2·layers outputs add up in the residual stream: scaled so that their sum keeps its size (GPT-2).
    residual_std = 0.02 / (2 * config.layers) ** 0.5
    return BlockSpecs(
        norm=final_norm(config),
        qkv=LinearSpec(h, h, num_fused=3, heads=heads),
        output=LinearSpec(h, h, transposed=True, std=residual_std, heads=heads),
        up=LinearSpec(h, inner, bias_gradient=False),
        down=LinearSpec(inner, h, transposed=True, std=residual_std),
    )


def positions(config: GPT2Config) -> PositionEmbeddingSpec:
    """Return the spec of the position embedding."""
    return PositionEmbeddingSpec(config.max_positions, config.hidden)


def final_norm(config: GPT2Config) -> LayerNormSpec:
    """Return the spec of the norm before the head."""
    return LayerNormSpec(config.hidden, config.norm_epsilon)


def describe(config: GPT2Config) -> Description:
    """Return the description of a GPT-2."""
    h, inner, specs = config.hidden, 4 * config.hidden, block_specs(config)
    attention_norm, mlp_norm = LayerNormCost("attention_norm", specs.norm), LayerNormCost("mlp_norm", specs.norm)
    activation, norm = ActivationCost(inner, inner, biased=True), LayerNormCost("norm", final_norm(config), False)
    block = ResidualBlock(
        branches=(
            (
                attention_norm,
                LinearCost("attention.qkv", specs.qkv, source=attention_norm),
                AttentionCost(config.heads, h, dropout=config.attention_dropout > 0),
                LinearCost("attention.output", specs.output),
            ),
            (
                mlp_norm,
                LinearCost("mlp.up", specs.up, source=mlp_norm),
                activation,
                LinearCost("mlp.down", specs.down, source=activation),
            ),
        ),
        features=h,
    )
    vocabulary = config.padded_vocab_size
    return Description(
        units=(
            Unit("", TokenEmbeddingCost("tokens", token_embedding(config))),
            Unit("", PositionEmbeddingCost("positions", positions(config))),
            *(Unit(f"blocks.{index}", block, block=True) for index in range(config.layers)),
            Unit("", norm),
            Unit("", LinearCost("head", head(config), tied="tokens.weight", source=norm)),
            Unit("", CrossEntropyCost(vocabulary)),
        ),
        rules=(
            Divisibility("model.heads", config.heads, ("x",)),
            Divisibility("model.hidden", h, ("y", "z")),
            Divisibility("model.hidden", h, ("x", "z")),
        ),
        tensors={STREAM: residual_stream(h)},
        model_flops=lambda samples, length: _model_flops(config, samples, length),
    )


def _model_flops(config: GPT2Config, samples: int, length: int) -> float:
    """Return the FLOPs of one training step, forward and backward, recomputation not counted (Narayanan et al.)."""
    h, layers, vocabulary = config.hidden, config.layers, config.padded_vocab_size
    attention_and_head = 1 + length / (6 * h) + vocabulary / (16 * layers * h)
    return 72 * samples * length * layers * h**2 * attention_and_head
