"""The settings of a GPT-2."""

import math
from dataclasses import dataclass

from gpt4d.config import ModelConfig


@dataclass
class GPT2Config(ModelConfig):
    """A GPT-2: pre-LayerNorm, learned positions, GELU, biases, head tied to the token embedding."""

    name: str = "gpt_tiny"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab_size: int = 4096  # number of token ids that the tokenizer may produce
    vocab_multiple: int = 128  # the embedding is padded to a multiple of this, so that gx·gz can divide it
    max_positions: int = 256  # the longest sequence
    dropout: float = 0.0  # of the embedding and of each block's two outputs
    attention_dropout: float = 0.0  # of the attention weights; above 0 the fused attention kernels are not used
    norm_epsilon: float = 1e-5

    @property
    def tied(self) -> bool:
        return True

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple
