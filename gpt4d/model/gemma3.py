"""Gemma 3 text models: norms on both sides of each branch, GeGLU, local and global attention. No torch here.

Shapes: T tokens, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import COUNT, SIZE, redefined, setting
from gpt4d.model import llama
from gpt4d.model.description import Description
from gpt4d.model.hugging_face import GLOBAL, LOCAL, ModelTable, TextAdapter, check_supported, unsupported
from gpt4d.model.parts import units_of
from gpt4d.model.text import TextModelSpec, text_family
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.activations import GegluFunction
from gpt4d.parallel.layers.embedding import EmbeddingFactorSpec
from gpt4d.parallel.layers.heads import Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass
class Gemma3Config(llama.LlamaSizes):
    """A Gemma 3 text model: four norms in each block, GeGLU, and attention that is local in most blocks."""

    name: str = redefined(llama.LlamaSizes, "name", "gemma3_tiny")
    layers: int = redefined(llama.LlamaSizes, "layers", 6)
    key_value_heads: int = redefined(llama.LlamaSizes, "key_value_heads", 1)
    inner: int = redefined(llama.LlamaSizes, "inner", 256)
    norm_epsilon: float = redefined(llama.LlamaSizes, "norm_epsilon", 1e-6)
    window: int = setting(64, "tokens that a token of a local block attends to, itself included", **SIZE)
    global_every: int = setting(6, "distance of blocks that attend to all earlier tokens", **COUNT)
    query_pre_attn_scalar: int = setting(32, "products of queries and keys are divided by its square root", **SIZE)
    rope_theta: float = setting(1e6, "base of the rotary frequencies of global blocks", above=1)
    rope_linear_factor: float = setting(1.0, "divisor of the rotary frequencies of global blocks", **SIZE)
    rope_local_theta: float = setting(1e4, "base of the rotary frequencies of local blocks", above=1)
    tied = zero_centered = True
    head_norms = "heads"
    branch_std = 0.02  # as of all weights, since the norm after a branch scales its output

    def extension(self, length: int) -> list[str]:
        factor = self.rope_linear_factor * length / self.max_positions
        return [f"model.max_positions={length}", f"model.rope_linear_factor={factor:.12g}"]

    @property
    def global_blocks(self) -> list[bool]:
        """Whether each block attends to all earlier tokens."""
        return [number % self.global_every == 0 for number in range(1, self.layers + 1)]


@dataclass(frozen=True)
class Gemma3MLPSpec(llama.LlamaMLPSpec):
    """A gated MLP with GELU."""

    activation = GegluFunction


@dataclass(frozen=True)
class Gemma3BlockSpec(LayerSpec):
    """A block with norms before and after the attention and before and after the MLP, [T, H] to [T, H]."""

    config: Gemma3Config
    attention: llama.LlamaAttentionSpec

    def layers(self) -> dict[str, LayerSpec]:
        before, behind = llama.norm(self.config), llama.branch_norm(self.config)
        return {
            "attention_norm": before,
            "attention": self.attention,
            "post_attention_norm": behind,
            "mlp_norm": before,
            "mlp": Gemma3MLPSpec(self.config),
            "post_mlp_norm": behind,
        }

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
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


def rotary_frequencies(config: Gemma3Config) -> tuple[list[float], list[float]]:
    """Return the angle per position of each pair of a head's features, in local blocks and in global blocks."""
    local, everywhere = (
        llama.plain_frequencies(config.head_size, theta) for theta in (config.rope_local_theta, config.rope_theta)
    )
    return local, [frequency / config.rope_linear_factor for frequency in everywhere]


def describe(config: Gemma3Config) -> Description:
    """Return the description of a Gemma 3."""
    scale, embeddings = config.query_pre_attn_scalar**-0.5, EmbeddingFactorSpec(config.hidden**0.5)
    block, global_block = (
        Gemma3BlockSpec(config, llama.LlamaAttentionSpec(config, Rotary(angles), window, scale))
        for angles, window in zip(rotary_frequencies(config), (config.window, None), strict=True)
    )
    model = Gemma3ModelSpec(
        config, block, llama.norm(config), {"embedding_factor": embeddings}, global_block=global_block
    )
    return replace(
        llama.describe_layers(config, block),
        model=model.of_parts,
        parts=(units_of(config.global_blocks),),
        # The embedding is multiplied by the square root of the width.
        width_exponents={"norm.weight": 0.5, "tokens.weight": 0.5},
    )


_TABLE = ModelTable(
    "Gemma3ForCausalLM",
    llama.LAYERS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    llama.SETTINGS | {"sliding_window": "window", "query_pre_attn_scalar": "query_pre_attn_scalar"},
    {"tied": True},
    llama.SUPPORTED
    | {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
    },
)


def write_settings(config: Gemma3Config) -> dict[str, Any]:
    """Return transformers' settings that are in no table."""
    everywhere: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_linear_factor != 1:
        everywhere |= {"rope_type": "linear", "factor": config.rope_linear_factor}
    local = {"rope_type": "default", "rope_theta": config.rope_local_theta}
    return {
        "head_dim": config.head_size,
        "layer_types": _layer_types(config.global_blocks),
        "rope_parameters": {GLOBAL: everywhere, LOCAL: local},
    }


def _layer_types(global_blocks: Sequence[bool]) -> list[str]:
    return [GLOBAL if is_global else LOCAL for is_global in global_blocks]


def read_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings that are in no table. transformers has converted older names to ``rope_parameters``."""
    types, (everywhere, local) = values["layer_types"], (values["rope_parameters"][kind] for kind in (GLOBAL, LOCAL))
    for rope, kinds in ((everywhere, ("default", "linear")), (local, ("default",))):
        check_supported(source, rope, {"rope_type": kinds, "partial_rotary_factor": (1.0, None)})
    every = types.index(GLOBAL) + 1 if GLOBAL in types else len(types) + 1  # no block is global
    if types != _layer_types([number % every == 0 for number in range(1, len(types) + 1)]):
        raise unsupported(source, "layer_types", "…", f"{GLOBAL} in every {every}th layer only")
    linear = everywhere.get("rope_type") == "linear"
    return {
        **llama.read_heads(source, values),
        "global_every": every,
        "rope_theta": float(everywhere["rope_theta"]),
        "rope_linear_factor": float(everywhere["factor"]) if linear else 1.0,
        "rope_local_theta": float(local["rope_theta"]),
    }


ADAPTER = TextAdapter(Gemma3Config, {"gemma3_text": _TABLE}, read_settings, write_settings)
FAMILY = text_family("gemma3", Gemma3Config, describe, ADAPTER, llama.check_layers)
