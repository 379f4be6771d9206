"""Gemma 3 text models, written like serial models: their layers determine the sharding. No torch here.

Shapes: T tokens, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

from gpt4d.model.description import Description, units_of
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.llama.frequencies import frequencies
from gpt4d.model.llama.model import LlamaAttentionSpec, LlamaMLPSpec
from gpt4d.model.llama.model import describe as describe_llama
from gpt4d.model.text import TextModelSpec
from gpt4d.parallel.layers.activations import GegluFunction
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.embedding import EmbeddingFactorSpec
from gpt4d.parallel.layers.heads import Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.norm import BranchNormSpec, HeadNormSpec, RMSNormSpec
from gpt4d.parallel.layers.sequence import TokenIndex

STD = 0.02  # standard deviation of all initial weights, since the norm after a branch scales its output


@dataclass(frozen=True)
class Gemma3AttentionSpec(LlamaAttentionSpec):
    """Grouped-query attention with norms of queries and keys.

    Attributes:
        config: as for ``LlamaAttentionSpec``.
        rotary: as for ``LlamaAttentionSpec``; blocks of one kind share it.
        window: as for ``AttentionSpec``.
        scale: as for ``AttentionSpec``.
    """

    window: int | None
    scale: float

    def layers(self) -> dict[str, LayerSpec]:
        config, layers = self.config, super().layers()
        norm = HeadNormSpec(config.head_size, config.head_parts, config.norm_epsilon, zero_centered=True)
        return layers | {
            "q_norm": norm,
            "k_norm": norm,
            "core": replace(cast(AttentionSpec, layers["core"]), window=self.window, scale=self.scale),
            "output": replace(cast(LinearSpec, layers["output"]), std=STD),
        }


@dataclass(frozen=True)
class Gemma3MLPSpec(LlamaMLPSpec):
    """A gated MLP with GELU."""

    activation = GegluFunction

    def layers(self) -> dict[str, LayerSpec]:
        layers = super().layers()
        return layers | {"down": replace(cast(LinearSpec, layers["down"]), std=STD)}


@dataclass(frozen=True)
class Gemma3BlockSpec(LayerSpec):
    """A block with norms before and after the attention and before and after the MLP, [T, H] to [T, H]."""

    config: LlamaConfig
    attention: Gemma3AttentionSpec

    def layers(self) -> dict[str, LayerSpec]:
        behind = BranchNormSpec(self.config.hidden, self.config.norm_epsilon, zero_centered=True)
        return {
            "attention_norm": norm(self.config),
            "attention": self.attention,
            "post_attention_norm": behind,
            "mlp_norm": norm(self.config),
            "mlp": Gemma3MLPSpec(self.config),
            "post_mlp_norm": behind,
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        x_TH = layer.post_attention_norm(x_TH, await layer.attention(normal_TH, tokens))
        x_TH, normal_TH = layer.mlp_norm(x_TH)
        return layer.post_mlp_norm(x_TH, await layer.mlp(normal_TH))


@dataclass(frozen=True, kw_only=True)
class Gemma3ModelSpec(TextModelSpec):
    """A Gemma 3, or parts of one. ``block`` is the spec of local blocks, ``global_block`` of global blocks."""

    global_block: LayerSpec

    def layers(self) -> dict[str, LayerSpec]:
        layers, is_global = super().layers(), self.config.global_blocks
        blocks = {name: self.global_block if is_global[int(name)] else self.block for name in layers["blocks"].layers()}
        return layers | {"blocks": LayersSpec(blocks)}


def norm(config: LlamaConfig) -> RMSNormSpec:
    """Return the norm before the attention, before the MLP and before the head."""
    return RMSNormSpec(config.hidden, config.norm_epsilon, zero_centered=True)


def rotary_frequencies(config: Gemma3Config) -> tuple[list[float], list[float]]:
    """Return the angle per position of each pair of a head's features, in local blocks and in global blocks."""
    local = frequencies(replace(config.llama, rope_theta=config.rope_local_theta))
    return local, [frequency / config.rope_linear_factor for frequency in frequencies(config.llama)]


def model(config: Gemma3Config) -> Gemma3ModelSpec:
    """Return the spec of a Gemma 3."""
    llama, scale = config.llama, config.query_pre_attn_scalar**-0.5
    block, global_block = (
        Gemma3BlockSpec(llama, Gemma3AttentionSpec(llama, Rotary(angles), window, scale))
        for angles, window in zip(rotary_frequencies(config), (config.window, None), strict=True)
    )
    embeddings = {"embedding_factor": EmbeddingFactorSpec(config.hidden**0.5)}
    return Gemma3ModelSpec(config, block, norm(llama), embeddings, global_block=global_block)


def describe(config: Gemma3Config) -> Description:
    """Return the description of a Gemma 3, which has the linear layers of a Llama."""
    return replace(
        describe_llama(config.llama),
        model=model(config).of_parts,
        parts=(units_of(config.global_blocks),),
        # The embedding is multiplied by the square root of the width.
        width_exponents={"norm.weight": 0.5, "tokens.weight": 0.5},
    )
