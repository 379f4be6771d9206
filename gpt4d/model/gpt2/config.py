"""The settings of a GPT-2."""

from dataclasses import dataclass

from gpt4d.config import ModelConfig
from gpt4d.model.text_config import PaddedVocabulary


@dataclass
class GPT2Config(PaddedVocabulary, ModelConfig):
    """A GPT-2: pre-LayerNorm, learned positions, GELU, biases, head tied to the token embedding."""

    name: str = "gpt_tiny"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab_size: int = 4096  # number of token ids that the tokenizer may produce
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this and of each stage's gx·gz
    max_positions: int = 256  # the longest sequence
    dropout: float = 0.0  # of the embedding and of each block's two outputs
    attention_dropout: float = 0.0  # of the attention weights; above 0 the fused attention kernels are not used
    norm_epsilon: float = 1e-5

    @property
    def tied(self) -> bool:
        return True
