"""GPT-2 without torch: layers in the order of execution, what the grid must divide, FLOPs."""

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


def describe(config: GPT2Config) -> Description:
    """Return the description of a GPT-2."""
    h, inner = config.hidden, 4 * config.hidden
    attention_norm, mlp_norm = LayerNormCost("attention_norm", h), LayerNormCost("mlp_norm", h)
    activation, norm = ActivationCost(inner, inner, biased=True), LayerNormCost("norm", h, branch=False)
    block = ResidualBlock(
        branches=(
            (
                attention_norm,
                LinearCost("attention.qkv", h, h, num_fused=3, heads=config.heads, source=attention_norm),
                AttentionCost(config.heads, h, dropout=config.attention_dropout > 0),
                LinearCost("attention.output", h, h, transposed=True, heads=config.heads),
            ),
            (
                mlp_norm,
                LinearCost("mlp.up", h, inner, source=mlp_norm, activated=True),
                activation,
                LinearCost("mlp.down", inner, h, transposed=True, source=activation),
            ),
        ),
        features=h,
    )
    vocabulary = config.padded_vocab_size
    return Description(
        units=(
            Unit("", TokenEmbeddingCost("tokens", vocabulary, h, config.vocab_size)),
            Unit("", PositionEmbeddingCost("positions", config.max_positions, h)),
            *(Unit(f"blocks.{index}", block, block=True) for index in range(config.layers)),
            Unit("", norm),
            Unit("", LinearCost("head", h, vocabulary, bias=False, tied="tokens.weight", source=norm)),
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
