"""The settings of a Gemma 3."""

from dataclasses import dataclass, fields

from gpt4d.model.llama.config import LlamaConfig, LlamaSizes


@dataclass
class Gemma3Config(LlamaSizes):
    """A Gemma 3 of text: four norms in each block, GeGLU, and attention that is local in most blocks."""

    name: str = "gemma3_tiny"
    layers: int = 6
    key_value_heads: int = 1
    inner: int = 256
    norm_epsilon: float = 1e-6
    window: int = 64  # tokens that a token of a local block attends to, itself included
    global_every: int = 6  # each so many-th block attends to all earlier tokens
    query_pre_attn_scalar: int = 32  # products of queries and keys are divided by its square root
    rope_theta: float = 1e6  # of global blocks
    rope_linear_factor: float = 1.0  # divides the rotary frequencies of global blocks
    rope_local_theta: float = 1e4

    @property
    def tied(self) -> bool:
        return True

    @property
    def llama(self) -> LlamaConfig:
        """The settings of the Llama with the same products and the rotary positions of global blocks."""
        sizes = {field.name: getattr(self, field.name) for field in fields(LlamaSizes)}
        return LlamaConfig(**sizes, qk_norm=True, rope_theta=self.rope_theta)

    @property
    def global_blocks(self) -> list[bool]:
        """Whether each block attends to all earlier tokens."""
        return [number % self.global_every == 0 for number in range(1, self.layers + 1)]
