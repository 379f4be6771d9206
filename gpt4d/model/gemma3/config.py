"""The settings of a Gemma 3."""

from dataclasses import dataclass, fields

from gpt4d.config import COUNT, SIZE, redefined, setting
from gpt4d.model.llama.config import LlamaConfig, LlamaSizes


@dataclass
class Gemma3Config(LlamaSizes):
    """A Gemma 3 text model: four norms in each block, GeGLU, and attention that is local in most blocks."""

    name: str = redefined(LlamaSizes, "name", "gemma3_tiny")
    layers: int = redefined(LlamaSizes, "layers", 6)
    key_value_heads: int = redefined(LlamaSizes, "key_value_heads", 1)
    inner: int = redefined(LlamaSizes, "inner", 256)
    norm_epsilon: float = redefined(LlamaSizes, "norm_epsilon", 1e-6)
    window: int = setting(64, "tokens that a token of a local block attends to, itself included", **SIZE)
    global_every: int = setting(6, "distance of blocks that attend to all earlier tokens", **COUNT)
    query_pre_attn_scalar: int = setting(32, "products of queries and keys are divided by its square root", **SIZE)
    rope_theta: float = setting(1e6, "base of the rotary frequencies of global blocks", above=1)
    rope_linear_factor: float = setting(1.0, "divisor of the rotary frequencies of global blocks", **SIZE)
    rope_local_theta: float = setting(1e4, "base of the rotary frequencies of local blocks", above=1)

    @property
    def tied(self) -> bool:
        return True

    @property
    def llama(self) -> LlamaConfig:
        """The settings of a Llama with the same linear layers and the rotary positions of global blocks."""
        sizes = {field.name: getattr(self, field.name) for field in fields(LlamaSizes)}
        return LlamaConfig(**sizes, qk_norm=True, rope_theta=self.rope_theta)

    def extension(self, length: int) -> list[str]:
        factor = self.rope_linear_factor * length / self.max_positions
        return [f"model.max_positions={length}", f"model.rope_linear_factor={factor:.12g}"]

    @property
    def global_blocks(self) -> list[bool]:
        """Whether each block attends to all earlier tokens."""
        return [number % self.global_every == 0 for number in range(1, self.layers + 1)]
