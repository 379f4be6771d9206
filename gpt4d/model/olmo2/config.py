"""The settings of an OLMo 2."""

from dataclasses import dataclass, fields

from gpt4d.config import redefined
from gpt4d.model.llama.config import LlamaConfig, RotaryConfig


@dataclass
class Olmo2Config(RotaryConfig):
    """An OLMo 2: a Llama with an RMSNorm behind each branch and norms of all queries and of all keys."""

    name: str = redefined(RotaryConfig, "name", "olmo2_tiny")
    norm_epsilon: float = redefined(RotaryConfig, "norm_epsilon", 1e-6)
    rope_theta: float = redefined(RotaryConfig, "rope_theta", 5e5)

    @property
    def tied(self) -> bool:
        return False

    @property
    def llama(self) -> LlamaConfig:
        """The settings of a Llama with the same linear layers and rotary positions."""
        return LlamaConfig(**{field.name: getattr(self, field.name) for field in fields(self)}, tied=False)
