"""The settings of a Llama, a Qwen2 or a Qwen3."""

import math
from dataclasses import dataclass, fields

from gpt4d.config import SIZE, redefined, setting
from gpt4d.config.conditions import unless
from gpt4d.config.fields import Condition
from gpt4d.model.text_config import TransformerConfig

ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass
class LlamaSizes(TransformerConfig):
    """The settings of all families with the linear layers of a Llama."""

    name: str = redefined(TransformerConfig, "name", "llama_tiny")
    key_value_heads: int = setting(2, "heads of keys and of values, a divisor of heads", **SIZE)
    head_size: int = setting(32, "features of a head", **SIZE)
    inner: int = setting(352, "features of the gated MLP", **SIZE)

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


ROPE_KEYS = tuple(field.name for field in fields(RotaryConfig) if field.name.startswith("rope_"))
