"""The settings of a Llama, a Qwen2 or a Qwen3."""

import math
from dataclasses import dataclass

from gpt4d.config import ModelConfig
from gpt4d.model.text_config import PaddedVocabulary


@dataclass
class LlamaSizes(PaddedVocabulary, ModelConfig):
    """The settings of all families with the products of a Llama."""

    name: str = "llama_tiny"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_value_heads: int = 2  # each serves heads / key_value_heads heads of queries
    head_size: int = 32
    inner: int = 352  # features of the gated MLP
    vocab_size: int = 4096  # number of token ids that the tokenizer may produce
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this and of each stage's gx·gz
    max_positions: int = 256  # the longest sequence
    norm_epsilon: float = 1e-5

    @property
    def qkv_channels(self) -> tuple[int, int, int]:
        """Features of queries, keys and values, which one product computes as a concatenation."""
        key_value = self.key_value_heads * self.head_size
        return self.heads * self.head_size, key_value, key_value

    @property
    def head_parts(self) -> int:
        """The parts that heads of queries, and columns of keys and values, can be split into equally.

        The columns are stored in as many pieces.
        """
        return math.gcd(self.heads, self.key_value_heads * self.head_size)


@dataclass
class LlamaConfig(LlamaSizes):
    """A Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Qwen2 has biases of queries, keys and values too, Qwen3 norms of queries and keys.
    """

    tied: bool = True  # the head is the token embedding
    qkv_bias: bool = False
    qk_norm: bool = False  # an RMSNorm of each head of queries and keys
    rope_theta: float = 1e4
    rope_scaling: str = "none"  # none, llama3 or yarn, for sequences longer than those of the first training
    rope_factor: float = 1.0  # how much longer
    rope_original_positions: int = 0  # the longest sequence of the first training
    rope_low_frequency: float = 1.0  # llama3: at most so many turns in these positions: slower by rope_factor
    rope_high_frequency: float = 4.0  # llama3: at least so many: unchanged
    rope_beta_slow: float = 1.0  # yarn: as rope_low_frequency
    rope_beta_fast: float = 32.0  # yarn: as rope_high_frequency
    rope_truncate: bool = True  # yarn: the limits are whole pairs of features
    rope_attention_factor: float = 0.0  # yarn: of queries and keys; 0: 0.1·ln(rope_factor) + 1
