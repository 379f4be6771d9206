"""Llama, Qwen2 and Qwen3: RMSNorm, rotary positions, SwiGLU, grouped-query attention. No torch here.

The forward reads like a serial model: the layers determine the sharding.
Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads, h heads, s size of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpt4d.config import SIZE, Config, ConfigError, Divisibility, divisors, redefined, setting
from gpt4d.config.conditions import unless
from gpt4d.config.fields import Condition
from gpt4d.model.description import Description
from gpt4d.model.hugging_face import ModelTable, TextAdapter, check_sizes, check_supported, unsupported
from gpt4d.model.parts import STREAM, residual_stream, units_of
from gpt4d.model.text import TextModelSpec, TransformerConfig, text_family
from gpt4d.parallel.kernels import KernelFunction, Tensor
from gpt4d.parallel.layers.activations import SwigluFunction
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.heads import KeyValueHeadsSpec, Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec, separate
from gpt4d.parallel.layers.norm import BranchNormSpec, HeadNormSpec, RMSNormSpec
from gpt4d.parallel.layers.product import Input, recomputable
from gpt4d.parallel.layers.sequence import TokenIndex

ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass
class LlamaSizes(TransformerConfig):
    """The settings of all families with the linear layers of a Llama.

    Attributes:
        zero_centered: as for ``RMSNormSpec``, in all norms.
        head_norms: norms of queries and keys: none, one of each of their heads, or one over the features of all heads.
    """

    name: str = redefined(TransformerConfig, "name", "llama_tiny")
    key_value_heads: int = setting(2, "heads of keys and of values, a divisor of heads", **SIZE)
    head_size: int = setting(32, "features of a head", **SIZE)
    inner: int = setting(352, "features of the gated MLP", **SIZE)

    qkv_bias = zero_centered = False

    @property
    def head_norms(self) -> str:
        return "none"

    @property
    def qkv_channels(self) -> tuple[int, int, int]:
        """Features of queries, keys and values, which one linear layer computes as a concatenation."""
        key_value = self.key_value_heads * self.head_size
        return self.heads * self.head_size, key_value, key_value

    @property
    def head_parts(self) -> int:
        """The number of equal parts into which query heads, and columns of keys and values, can be split.

        The columns are stored in the same number of pieces.
        """
        return math.gcd(self.heads, self.key_value_heads * self.head_size)


def _scaled(*scalings: str) -> Condition:
    """Return the condition that ``model.rope_scaling`` is one of ``scalings``."""
    others = {*ROPE_SCALINGS} - {*scalings}
    return unless("model.rope_scaling", *others, remedy=f"set model.rope_scaling={' or '.join(scalings)}")


@dataclass
class RotaryConfig(LlamaSizes):
    """The settings of all families whose rotary positions can be scaled in each of transformers' static ways."""

    rope_theta: float = setting(1e4, "base of the rotary frequencies", above=1)
    rope_scaling: str = setting("none", "scaling for longer sequences", choices=ROPE_SCALINGS)
    # fmt: off
    rope_factor: float = setting(1.0, "ratio of the maximum lengths with and without scaling", **SIZE,
        read_if=_scaled("linear", "llama3", "yarn"))
    rope_original_positions: int = setting(0, "llama3, yarn: maximum length before scaling", **(SIZE | {"at_least": 0}),
        read_if=_scaled("llama3", "yarn"))
    rope_low_frequency: float = setting(1.0, "llama3: maximum rotations of frequencies that rope_factor divides",
        above=0, read_if=_scaled("llama3"))
    rope_high_frequency: float = setting(4.0, "llama3: minimum rotations of unchanged frequencies", above=0,
        read_if=_scaled("llama3"))
    rope_beta_slow: float = setting(1.0, "yarn: as rope_low_frequency", above=0, read_if=_scaled("yarn"))
    rope_beta_fast: float = setting(32.0, "yarn: as rope_high_frequency", above=0, read_if=_scaled("yarn"))
    rope_truncate: bool = setting(True, "yarn: the limits are whole pairs of features", read_if=_scaled("yarn"))
    rope_attention_factor: float = setting(0.0, "yarn: factor of queries and keys; 0: 0.1·ln(rope_factor) + 1",
        **(SIZE | {"at_least": 0}), read_if=_scaled("yarn"))
    # fmt: on

    def extension(self, length: int) -> list[str]:
        original = self.rope_original_positions or self.max_positions / self.rope_factor
        factor, settings = length / original, [f"model.max_positions={length}"]
        if self.rope_scaling == "none":
            settings += [
                "model.rope_scaling=yarn",
                f"model.rope_factor={length / self.max_positions:.12g}",
                f"model.rope_original_positions={self.max_positions}",
            ]
        elif factor > self.rope_factor:
            settings.append(f"model.rope_factor={factor:.12g}")
        return settings


@dataclass
class LlamaConfig(RotaryConfig):
    """A Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Qwen2 also has biases of queries, keys and values, and Qwen3 has norms of queries and keys.
    """

    tied: bool = setting(True, "the head is the token embedding")
    qkv_bias: bool = setting(False, "biases of queries, keys and values")
    qk_norm: bool = setting(False, "an RMSNorm of each head of queries and keys")

    @property
    def head_norms(self) -> str:
        return "heads" if self.qk_norm else "none"


def check_layers(config: Config) -> None:
    """Raise ConfigError for layers that are impossible on any grid."""
    model = config.model
    assert isinstance(model, LlamaSizes)
    if model.heads % model.key_value_heads:
        choices = ", ".join(map(str, divisors(model.heads)))
        raise ConfigError(
            f"model.key_value_heads={model.key_value_heads}: does not divide model.heads={model.heads}; use one of "
            f"{choices}"
        )
    if model.head_size % 2:
        raise ConfigError(
            f"model.head_size={model.head_size}: odd; use an even number, since rotary positions turn pairs of features"
        )
    if isinstance(model, RotaryConfig) and model.rope_scaling in ("llama3", "yarn"):
        _check_rope(model)


def _check_rope(model: RotaryConfig) -> None:
    if model.rope_original_positions < 1:
        raise ConfigError(
            f"model.rope_original_positions={model.rope_original_positions}: set it to the longest sequence of the "
            "training without model.rope_scaling"
        )
    low, high = ("low_frequency", "high_frequency") if model.rope_scaling == "llama3" else ("beta_slow", "beta_fast")
    slow, fast = getattr(model, f"rope_{low}"), getattr(model, f"rope_{high}")
    if not slow < fast:
        raise ConfigError(f"model.rope_{low}={slow}: use a value below model.rope_{high}={fast}")


def plain_frequencies(size: int, theta: float) -> list[float]:
    """Return the angle per position, in radians, of each pair of the ``size`` features of a head, without scaling."""
    return [theta ** (-2 * pair / size) for pair in range(size // 2)]


def frequencies(config: RotaryConfig) -> list[float]:
    """Return the angle per position, in radians, of each pair of a head's features."""
    plain = plain_frequencies(config.head_size, config.rope_theta)
    if config.rope_scaling == "none":
        return plain
    shares = [_SHARES[config.rope_scaling](config, pair, frequency) for pair, frequency in enumerate(plain)]
    return [f * (kept + (1 - kept) / config.rope_factor) for f, kept in zip(plain, shares, strict=True)]


def scale(config: RotaryConfig) -> float:
    """Return the factor of rotated queries and keys: YaRN sharpens the attention of long sequences."""
    if config.rope_scaling != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(max(config.rope_factor, 1.0)) + 1


def _linear_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return no share of the unscaled frequency: all frequencies are divided by the factor (Chen et al., 2023)."""
    return 0.0


def _llama3_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return the share of the unscaled frequency, from 0 for slow pairs to 1 for fast pairs (Llama 3.1)."""
    rotations = config.rope_original_positions * frequency / (2 * math.pi)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    return min(1.0, max(0.0, (rotations - low) / (high - low)))


def _yarn_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return the share of the unscaled frequency, a ramp over the pairs of features (YaRN, §3.2)."""

    def place(rotations: float) -> float:
        """Return the index of the feature pair that completes this many rotations in the original maximum length."""
        log = math.log(config.rope_original_positions / (rotations * 2 * math.pi))
        return config.head_size * log / (2 * math.log(config.rope_theta))

    first, last = place(config.rope_beta_fast), place(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_size - 1)
    if first == last:
        last += 0.001
    return 1 - min(1.0, max(0.0, (pair - first) / (last - first)))


_SHARES = {"linear": _linear_share, "llama3": _llama3_share, "yarn": _yarn_share}


@dataclass(frozen=True)
class LlamaAttentionSpec(LayerSpec):
    """Grouped-query attention.

    Attributes:
        config: the settings of the model.
        rotary: the rotary positions, which all blocks with equal ones share.
        window: as for ``AttentionSpec``.
        scale: as for ``AttentionSpec``.
    """

    config: LlamaSizes
    rotary: Rotary
    window: int | None = None
    scale: float | None = None

    def layers(self) -> dict[str, LayerSpec]:
        config, h, parts, channels = self.config, self.config.hidden, self.config.head_parts, self.config.qkv_channels
        std = 0.02 if config.head_norms == "all" else config.branch_std
        each = HeadNormSpec(config.head_size, parts, config.norm_epsilon, config.zero_centered)
        layers: dict[str, LayerSpec] = {
            "qkv": LinearSpec(h, sum(channels), bias=config.qkv_bias, heads=parts, matrices=channels),
            "key_value_heads": KeyValueHeadsSpec(config.heads, config.key_value_heads, parts),
            **({"q_norm": each, "k_norm": each} if config.head_norms == "heads" else {}),
            "core": AttentionSpec(config.heads, parts=parts, window=self.window, scale=self.scale),
            "output": LinearSpec(channels[0], h, transposed=True, bias=False, std=std, heads=parts),
        }
        if config.head_norms == "all":
            layers["q_norm"], layers["k_norm"] = (
                HeadNormSpec(size, parts, config.norm_epsilon, across_heads=True) for size in channels[:2]
            )
        return layers

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
        config = self.config
        qkv_BSN = (await layer.qkv(x_TH)).unflatten(0, (-1, tokens.length))
        q_BSN, k_BSN, v_BSN = separate(qkv_BSN, config.qkv_channels, config.head_parts)
        del qkv_BSN
        if config.head_norms == "all":  # before a rank gathers heads, since it may have a part of a head
            q_BSN, k_BSN = layer.q_norm(q_BSN), layer.k_norm(k_BSN)
        q_BShs = q_BSN.unflatten(-1, (-1, config.head_size))
        k_BShs, v_BShs = await layer.key_value_heads(k_BSN, v_BSN)
        if config.head_norms == "heads":
            q_BShs, k_BShs = layer.q_norm(q_BShs), layer.k_norm(k_BShs)
        mixed_TN = await layer.core(self.rotary(q_BShs, tokens), self.rotary(k_BShs, tokens), v_BShs, tokens)
        return await layer.output(mixed_TN)


@dataclass(frozen=True)
class LlamaMLPSpec(LayerSpec):
    """A gated MLP, with SiLU unless a subclass has another ``activation``: [T, H] to [T, H]."""

    config: LlamaSizes
    activation: ClassVar[type[KernelFunction]] = SwigluFunction

    def layers(self) -> dict[str, LayerSpec]:
        h, inner = self.config.hidden, self.config.inner
        return {
            "up": LinearSpec(h, inner, num_fused=2, bias=False, matrices=(inner, inner)),
            "down": LinearSpec(inner, h, transposed=True, bias=False, std=self.config.branch_std),
        }

    async def forward(self, layer: BoundLayer, x_TH: Input) -> Tensor:
        return await layer.down(recomputable(layer, self.activation.apply, await layer.up(x_TH)))


@dataclass(frozen=True)
class LlamaBlockSpec(LayerSpec):
    """Pre-norm attention and MLP, each added to the residual stream [T, H]."""

    config: LlamaSizes
    rotary: Rotary

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "attention_norm": norm(self.config),
            "attention": LlamaAttentionSpec(self.config, self.rotary),
            "mlp_norm": norm(self.config),
            "mlp": LlamaMLPSpec(self.config),
        }

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        x_TH, normal_TH = layer.mlp_norm(x_TH, await layer.attention(normal_TH, tokens))
        return x_TH + await layer.mlp(normal_TH)


def norm(config: LlamaSizes) -> RMSNormSpec:
    """Return the norm before the attention, before the MLP and before the head."""
    return RMSNormSpec(config.hidden, config.norm_epsilon, config.zero_centered)


def branch_norm(config: LlamaSizes) -> BranchNormSpec:
    """Return the norm behind the attention and behind the MLP."""
    return BranchNormSpec(config.hidden, config.norm_epsilon, config.zero_centered)


def rotary(config: RotaryConfig) -> Rotary:
    """Return the rotary positions of all blocks."""
    return Rotary(frequencies(config), scale(config))


def describe_layers(config: LlamaSizes, block: LayerSpec) -> Description:
    """Return the description of a model of equal blocks with the linear layers of a Llama."""
    h, attended = config.hidden, config.heads * config.head_size
    return Description(
        model=TextModelSpec(config, block, norm(config), {}).of_parts,
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


def describe(config: LlamaConfig) -> Description:
    """Return the description of a Llama, a Qwen2 or a Qwen3."""
    return describe_layers(config, LlamaBlockSpec(config, rotary(config)))


LAYERS = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
SUPPORTED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
}
# The settings in rope_parameters for each rope_type. Files may omit the optional ones.
_ROPE = {"factor": "rope_factor"}
_LONGER = _ROPE | {"original_max_position_embeddings": "rope_original_positions"}
_ROPES = {
    "default": {},
    "linear": _ROPE,
    "llama3": _LONGER | {"low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency"},
    "yarn": _LONGER | {key: f"rope_{key}" for key in ("beta_slow", "beta_fast", "truncate", "attention_factor")},
}
_OPTIONAL = "beta_slow", "beta_fast", "attention_factor"


def write_settings(config: RotaryConfig) -> dict[str, Any]:
    """Return transformers' settings that are in no table."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    scaling = {theirs: getattr(config, ours) for theirs, ours in _ROPES[kind].items()}
    if not config.rope_attention_factor:
        scaling.pop("attention_factor", None)
    rope = {"rope_theta": config.rope_theta, "rope_type": kind, **scaling}
    return {"head_dim": config.head_size, "rope_parameters": rope}


def read_heads(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of heads from transformers' settings. Raises ConfigError for impossible heads."""
    heads, key_value_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_size = values.get("head_dim") or values["hidden_size"] // heads
    check_sizes(source, {"head_dim": head_size})
    if heads % key_value_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads={key_value_heads} does not divide num_attention_heads={heads}; use a model "
            "whose keys and values each serve equally many queries"
        )
    return {"head_size": head_size}


def read_settings(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings that are in no table. transformers has converted older names to ``rope_parameters``."""
    if {*(values.get("layer_types") or ())} - {"full_attention"}:
        raise unsupported(source, "layer_types", "…", "full_attention")
    rope: dict[str, Any] = {"truncate": True, **values["rope_parameters"]}
    kind = rope["rope_type"]
    check_supported(source, rope, {"mscale": (None,), "mscale_all_dim": (None,), "partial_rotary_factor": (1.0, None)})
    if kind not in _ROPES:
        raise unsupported(source, "rope_type", kind, "default, linear, llama3 or yarn")
    if kind == "yarn" and rope.get("attention_factor") == 0:
        raise unsupported(source, "attention_factor", 0, "a number above 0")
    if kind in ("llama3", "yarn") and rope["factor"] is None:
        rope["factor"] = values["max_position_embeddings"] / rope["original_max_position_embeddings"]
    found = {"rope_theta": float(rope["rope_theta"])}
    for theirs, ours in _ROPES[kind].items():
        if theirs not in _OPTIONAL or rope.get(theirs) is not None:
            convert = {"rope_original_positions": lambda value: value, "rope_truncate": bool}.get(ours, float)
            found[ours] = convert(rope[theirs])
    return {**read_heads(source, values), **found, "rope_scaling": "none" if kind == "default" else kind}


_LLAMA = ModelTable("LlamaForCausalLM", LAYERS, SETTINGS, {"qkv_bias": False, "qk_norm": False}, SUPPORTED)
_QWEN2 = replace(_LLAMA, architecture="Qwen2ForCausalLM", fixed={"qkv_bias": True, "qk_norm": False})
_QWEN3 = replace(_LLAMA, architecture="Qwen3ForCausalLM", fixed={"qkv_bias": False, "qk_norm": True})
ADAPTER = TextAdapter(
    LlamaConfig, {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}, read=read_settings, write=write_settings
)
FAMILY = text_family("llama", LlamaConfig, describe, ADAPTER, check_layers)
