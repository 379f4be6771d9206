"""GPT-2, written like a serial model: its layers determine the sharding, and chunks interleave at ``await``.

Shapes: T tokens, H hidden, N hidden within the heads. No torch here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from gpt4d.config import Divisibility
from gpt4d.model.description import STREAM, Description, residual_stream, units_of
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.text import TextModelSpec
from gpt4d.parallel.layers.activations import DropoutSpec, gelu_of_biased
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.layers.product import recomputable
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass(frozen=True)
class GPT2AttentionSpec(LayerSpec):
    """Causal multi-head attention with biases, [T, H] to [T, H]."""

    config: GPT2Config

    def layers(self) -> dict[str, LayerSpec]:
        h, heads = self.config.hidden, self.config.heads
        return {
            "qkv": LinearSpec(h, h, num_fused=3, heads=heads),
            "core": FusedAttentionSpec(heads, self.config.attention_dropout),
            "output": LinearSpec(h, h, transposed=True, std=residual_std(self.config), heads=heads),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        mixed_TN = await layer.core(await layer.qkv(x_TH), tokens)
        return await layer.output(mixed_TN)


@dataclass(frozen=True)
class GPT2MLPSpec(LayerSpec):
    """Two linear layers with GELU between them, [T, H] to [T, H]."""

    config: GPT2Config

    def layers(self) -> dict[str, LayerSpec]:
        h, inner = self.config.hidden, 4 * self.config.hidden
        return {
            "up": LinearSpec(h, inner, bias_gradient=False),
            "down": LinearSpec(inner, h, transposed=True, std=residual_std(self.config)),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any) -> Any:
        activation = partial(gelu_of_biased, bias=layer.up.bias)
        return await layer.down(recomputable(layer, activation, await layer.up(x_TH)))


@dataclass(frozen=True)
class GPT2BlockSpec(LayerSpec):
    """Pre-norm attention and MLP, each added to the residual stream [T, H]."""

    config: GPT2Config

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "attention_norm": norm(self.config),
            "attention": GPT2AttentionSpec(self.config),
            "attention_dropout": DropoutSpec(self.config.dropout),
            "mlp_norm": norm(self.config),
            "mlp": GPT2MLPSpec(self.config),
            "mlp_dropout": DropoutSpec(self.config.dropout),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        attended_TH = layer.attention_dropout(await layer.attention(normal_TH, tokens), tokens)
        x_TH, normal_TH = layer.mlp_norm(x_TH, attended_TH)
        return x_TH + layer.mlp_dropout(await layer.mlp(normal_TH), tokens)


def norm(config: GPT2Config) -> LayerNormSpec:
    """Return the norm before the attention, before the MLP and before the head."""
    return LayerNormSpec(config.hidden, config.norm_epsilon)


def residual_std(config: GPT2Config) -> float:
    """Return the initial standard deviation of the last layer of each branch: 2·layers outputs are added (GPT-2)."""
    return 0.02 / (2 * config.layers) ** 0.5


def model(config: GPT2Config) -> TextModelSpec:
    """Return the spec of a GPT-2."""
    embeddings = {
        "positions": PositionEmbeddingSpec(config.max_positions, config.hidden),
        "dropout": DropoutSpec(config.dropout),
    }
    return TextModelSpec(config, GPT2BlockSpec(config), norm(config), embeddings)


def describe(config: GPT2Config) -> Description:
    """Return the description of a GPT-2."""
    h = config.hidden
    return Description(
        model=model(config).of_parts,
        parts=(units_of([0] * config.layers),),
        rules=(
            Divisibility("model.heads", config.heads, ("x",)),
            Divisibility("model.hidden", h, ("y", "z")),
            Divisibility("model.hidden", h, ("x", "z")),
        ),
        tensors={STREAM: residual_stream(h)},
        width_exponents={"norm.weight": 1, "norm.bias": 1},
    )
