"""GPT-2: pre-LayerNorm, learned positions, GELU, biases, the head tied to the token embedding. No torch here.

The forward reads like a serial model: the layers determine the sharding, and chunks interleave at ``await``.
Shapes: T tokens, H hidden, N hidden within the heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpt4d.config import FRACTION, Config, ConfigError, Divisibility, divisors, redefined, setting
from gpt4d.model.description import Description
from gpt4d.model.hugging_face import ModelTable, TextAdapter, check_supported
from gpt4d.model.parts import STREAM, residual_stream, units_of
from gpt4d.model.text import TextModelSpec, TransformerConfig, text_family
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.activations import DropoutSpec, gelu_of_biased
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.embedding import PositionEmbeddingSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.layers.product import Input, recomputable
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass
class GPT2Config(TransformerConfig):
    """A GPT-2: pre-LayerNorm, learned positions, GELU, biases, head tied to the token embedding."""

    name: str = redefined(TransformerConfig, "name", "gpt_tiny")
    dropout: float = setting(0.0, "dropout of the embedding and of each block's two outputs", **FRACTION)
    attention_dropout: float = setting(
        0.0, "dropout of attention weights, for which no fused kernels exist", **FRACTION
    )
    tied = True
    unstructured = TransformerConfig.unstructured | {"dropout", "attention_dropout"}


def check(config: Config) -> None:
    """Raise ConfigError for a model that is impossible on any grid."""
    model = config.model
    assert isinstance(model, GPT2Config)
    if model.hidden % model.heads:
        choices = ", ".join(map(str, divisors(model.hidden)))
        raise ConfigError(
            f"model.heads={model.heads}: does not divide model.hidden={model.hidden}; use one of {choices}"
        )
    if model.attention_dropout and config.parallel.context_exchange == "ring":
        raise ConfigError(
            f"parallel.context_exchange=ring: model.attention_dropout={model.attention_dropout} needs the keys of "
            "complete sequences; use parallel.context_exchange=all_gather, or model.attention_dropout=0"
        )


@dataclass(frozen=True)
class GPT2AttentionSpec(LayerSpec):
    """Causal multi-head attention with biases, [T, H] to [T, H]."""

    config: GPT2Config

    def layers(self) -> dict[str, LayerSpec]:
        h, heads = self.config.hidden, self.config.heads
        return {
            "qkv": LinearSpec(h, h, num_fused=3, heads=heads),
            "core": FusedAttentionSpec(heads, self.config.attention_dropout),
            "output": LinearSpec(h, h, transposed=True, std=self.config.branch_std, heads=heads),
        }

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
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
            "down": LinearSpec(inner, h, transposed=True, std=self.config.branch_std),
        }

    async def forward(self, layer: BoundLayer, x_TH: Input) -> Tensor:
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

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        attended_TH = layer.attention_dropout(await layer.attention(normal_TH, tokens), tokens)
        x_TH, normal_TH = layer.mlp_norm(x_TH, attended_TH)
        return x_TH + layer.mlp_dropout(await layer.mlp(normal_TH), tokens)


def norm(config: GPT2Config) -> LayerNormSpec:
    """Return the norm before the attention, before the MLP and before the head."""
    return LayerNormSpec(config.hidden, config.norm_epsilon)


def describe(config: GPT2Config) -> Description:
    """Return the description of a GPT-2."""
    h = config.hidden
    embeddings = {"positions": PositionEmbeddingSpec(config.max_positions, h), "dropout": DropoutSpec(config.dropout)}
    return Description(
        model=TextModelSpec(config, GPT2BlockSpec(config), norm(config), embeddings).of_parts,
        parts=(units_of([0] * config.layers),),
        rules=(
            Divisibility("model.heads", config.heads, ("x",)),
            Divisibility("model.hidden", h, ("y", "z")),
            Divisibility("model.hidden", h, ("x", "z")),
        ),
        tensors={STREAM: residual_stream(h)},
        width_exponents={"norm.weight": 1, "norm.bias": 1},
    )


_TABLE = ModelTable(
    "GPT2LMHeadModel",
    {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "blocks": "transformer.h",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    {
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "n_embd": "hidden",
        "n_layer": "layers",
        "n_head": "heads",
        "embd_pdrop": "dropout",
        "resid_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm_epsilon",
    },
    supported={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
)


def read_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check transformers' settings that depend on others. Raises ConfigError for unsupported ones."""
    required = {"n_inner": (None, 4 * values["n_embd"]), "embd_pdrop": (values["resid_pdrop"],)}
    check_supported(source, values, required)
    if values["n_embd"] % values["n_head"]:
        raise ConfigError(
            f"{source}: n_head={values['n_head']} does not divide n_embd={values['n_embd']}; "
            "use a model whose heads have equal sizes"
        )
    return {}


ADAPTER = TextAdapter(
    GPT2Config,
    {"gpt2": _TABLE},
    read_settings,
    rows_first=True,
    BASE="transformer.",
    BUFFERS=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)
FAMILY = text_family("gpt2", GPT2Config, describe, ADAPTER, check)
