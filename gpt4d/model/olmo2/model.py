"""OLMo 2, written like a serial model: its layers determine the sharding. No torch here.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads, h heads, s size of a head.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

from gpt4d.model.description import Description
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.llama.frequencies import frequencies, scale
from gpt4d.model.llama.model import LlamaAttentionSpec, LlamaMLPSpec, norm
from gpt4d.model.llama.model import describe as describe_llama
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.model.text import TextModelSpec
from gpt4d.parallel.layers.heads import Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec, separate
from gpt4d.parallel.layers.norm import AllHeadsNormSpec, BranchNormSpec
from gpt4d.parallel.layers.sequence import TokenIndex

STD = 0.02  # standard deviation of all initial weights, since the norm after a branch scales its output


@dataclass(frozen=True)
class Olmo2AttentionSpec(LlamaAttentionSpec):
    """Grouped-query attention with norms of queries and keys, each over the features of all heads."""

    def layers(self) -> dict[str, LayerSpec]:
        config, layers = self.config, super().layers()
        queries, keys, _ = config.qkv_channels
        return layers | {
            "output": replace(cast(LinearSpec, layers["output"]), std=STD),
            "q_norm": AllHeadsNormSpec(queries, config.head_parts, config.norm_epsilon),
            "k_norm": AllHeadsNormSpec(keys, config.head_parts, config.norm_epsilon),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        config = self.config
        qkv_BSN = (await layer.qkv(x_TH)).unflatten(0, (-1, tokens.length))
        q_BSN, k_BSN, v_BSN = separate(qkv_BSN, config.qkv_channels, config.head_parts)
        del qkv_BSN
        # Normalize keys before a rank gathers heads, since a rank may have a part of a head.
        q_BSN, k_BSN = layer.q_norm(q_BSN), layer.k_norm(k_BSN)
        k_BShs, v_BShs = await layer.key_value_heads(k_BSN, v_BSN)
        q_BShs = self.rotary(q_BSN.unflatten(-1, (-1, config.head_size)), tokens)
        return await layer.output(await layer.core(q_BShs, self.rotary(k_BShs, tokens), v_BShs, tokens))


@dataclass(frozen=True)
class Olmo2MLPSpec(LlamaMLPSpec):
    """A gated MLP with SiLU and initial weights of standard deviation ``STD``, [T, H] to [T, H]."""

    def layers(self) -> dict[str, LayerSpec]:
        layers = super().layers()
        return layers | {"down": replace(cast(LinearSpec, layers["down"]), std=STD)}


@dataclass(frozen=True)
class Olmo2BlockSpec(LayerSpec):
    """Attention and MLP, each with a norm of its output, added to the residual stream [T, H]."""

    config: LlamaConfig
    rotary: Rotary

    def layers(self) -> dict[str, LayerSpec]:
        behind = BranchNormSpec(self.config.hidden, self.config.norm_epsilon)
        return {
            "attention": Olmo2AttentionSpec(self.config, self.rotary),
            "attention_norm": behind,
            "mlp": Olmo2MLPSpec(self.config),
            "mlp_norm": behind,
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        x_TH = layer.attention_norm(x_TH, await layer.attention(x_TH, tokens))
        return layer.mlp_norm(x_TH, await layer.mlp(x_TH))


def model(config: Olmo2Config) -> TextModelSpec:
    """Return the spec of an OLMo 2."""
    llama = config.llama
    rotary = Rotary(frequencies(llama), scale(llama))
    return TextModelSpec(config, Olmo2BlockSpec(llama, rotary), norm(llama), {})


def describe(config: Olmo2Config) -> Description:
    """Return the description of an OLMo 2, which has the linear layers of a Llama."""
    return replace(describe_llama(config.llama), model=model(config).of_parts)
