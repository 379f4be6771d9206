"""The settings of a GPT-2."""

from dataclasses import dataclass

from gpt4d.config import FRACTION, redefined, setting
from gpt4d.model.text_config import TransformerConfig


@dataclass
class GPT2Config(TransformerConfig):
    """A GPT-2: pre-LayerNorm, learned positions, GELU, biases, head tied to the token embedding."""

    name: str = redefined(TransformerConfig, "name", "gpt_tiny")
    dropout: float = setting(0.0, "dropout of the embedding and of each block's two outputs", **FRACTION)
    attention_dropout: float = setting(
        0.0, "dropout of attention weights, for which no fused kernels exist", **FRACTION
    )

    @property
    def tied(self) -> bool:
        return True
