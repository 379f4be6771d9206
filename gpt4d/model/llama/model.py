"""Llama, Qwen2 and Qwen3, written like serial models: their layers determine the sharding. No torch here.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads, h heads, s size of a head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from gpt4d.config import Divisibility
from gpt4d.model.description import STREAM, Description, residual_stream, units_of
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.llama.frequencies import frequencies, scale
from gpt4d.model.text import TextModelSpec
from gpt4d.parallel.layers.activations import GatedFunction, SwigluFunction
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.heads import KeyValueHeadsSpec, Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec, separate
from gpt4d.parallel.layers.norm import HeadNormSpec, RMSNormSpec
from gpt4d.parallel.layers.product import recomputable
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass(frozen=True)
class LlamaAttentionSpec(LayerSpec):
    """Grouped-query attention. All blocks share ``rotary``."""

    config: LlamaConfig
    rotary: Rotary

    def layers(self) -> dict[str, LayerSpec]:
        config, h, parts = self.config, self.config.hidden, self.config.head_parts
        norms: dict[str, LayerSpec] = {}
        if config.qk_norm:
            norm = HeadNormSpec(config.head_size, parts, config.norm_epsilon)
            norms = {"q_norm": norm, "k_norm": norm}
        return {
            "qkv": LinearSpec(
                h, sum(config.qkv_channels), bias=config.qkv_bias, heads=parts, matrices=config.qkv_channels
            ),
            "key_value_heads": KeyValueHeadsSpec(config.heads, config.key_value_heads, parts),
            **norms,
            "core": AttentionSpec(config.heads, parts=parts),
            "output": LinearSpec(
                config.heads * config.head_size,
                h,
                transposed=True,
                bias=False,
                std=residual_std(config),
                heads=parts,
            ),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        config = self.config
        qkv_BSN = (await layer.qkv(x_TH)).unflatten(0, (-1, tokens.length))
        q_BSN, k_BSN, v_BSN = separate(qkv_BSN, config.qkv_channels, config.head_parts)
        del qkv_BSN
        q_BShs = q_BSN.unflatten(-1, (-1, config.head_size))
        k_BShs, v_BShs = await layer.key_value_heads(k_BSN, v_BSN)
        if config.qk_norm:
            q_BShs, k_BShs = layer.q_norm(q_BShs), layer.k_norm(k_BShs)
        mixed_TN = await layer.core(self.rotary(q_BShs, tokens), self.rotary(k_BShs, tokens), v_BShs, tokens)
        return await layer.output(mixed_TN)


@dataclass(frozen=True)
class LlamaMLPSpec(LayerSpec):
    """A gated MLP with SiLU, [T, H] to [T, H]."""

    config: LlamaConfig
    activation: ClassVar[type[GatedFunction]] = SwigluFunction

    def layers(self) -> dict[str, LayerSpec]:
        h, inner = self.config.hidden, self.config.inner
        return {
            "up": LinearSpec(h, inner, num_fused=2, bias=False, matrices=(inner, inner)),
            "down": LinearSpec(inner, h, transposed=True, bias=False, std=residual_std(self.config)),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any) -> Any:
        return await layer.down(recomputable(layer, self.activation.apply, await layer.up(x_TH)))


@dataclass(frozen=True)
class LlamaBlockSpec(LayerSpec):
    """Pre-norm attention and MLP, each added to the residual stream [T, H]."""

    config: LlamaConfig
    rotary: Rotary

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "attention_norm": norm(self.config),
            "attention": LlamaAttentionSpec(self.config, self.rotary),
            "mlp_norm": norm(self.config),
            "mlp": LlamaMLPSpec(self.config),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        x_TH, normal_TH = layer.mlp_norm(x_TH, await layer.attention(normal_TH, tokens))
        return x_TH + await layer.mlp(normal_TH)


def norm(config: LlamaConfig) -> RMSNormSpec:
    """Return the norm before the attention, before the MLP and before the head."""
    return RMSNormSpec(config.hidden, config.norm_epsilon)


def residual_std(config: LlamaConfig) -> float:
    """Return the initial standard deviation of the last layer of each branch: 2·layers outputs are added (GPT-2)."""
    return 0.02 / (2 * config.layers) ** 0.5


def model(config: LlamaConfig) -> TextModelSpec:
    """Return the spec of a Llama, a Qwen2 or a Qwen3."""
    rotary = Rotary(frequencies(config), scale(config))
    return TextModelSpec(config, LlamaBlockSpec(config, rotary), norm(config), {})


def describe(config: LlamaConfig) -> Description:
    """Return the description of a Llama, a Qwen2 or a Qwen3."""
    h, attended = config.hidden, config.heads * config.head_size
    return Description(
        model=model(config).of_parts,
        parts=(units_of([0] * config.layers),),
        rules=(
            Divisibility("model.heads", config.heads, ("x",)),
            Divisibility("model.key_value_heads·head_size", config.key_value_heads * config.head_size, ("x",)),
            Divisibility("model.hidden", h, ("y", "z")),
            Divisibility("model.heads·head_size", attended, ("x", "z")),
            Divisibility("model.inner", config.inner, ("x", "z")),
        ),
        tensors={STREAM: residual_stream(h)},
        width_exponents={"norm.weight": 1},
    )
