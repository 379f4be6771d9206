"""OLMo 2: RMSNorm behind each branch, norms of all queries and of all keys, rotary positions, SwiGLU. No torch here.

Shapes: T tokens, H hidden.
"""

from dataclasses import dataclass

from gpt4d.config import redefined
from gpt4d.model import llama
from gpt4d.model.description import Description
from gpt4d.model.hugging_face import ModelTable, TextAdapter
from gpt4d.model.text import text_family
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass
class Olmo2Config(llama.RotaryConfig):
    """An OLMo 2: a Llama with an RMSNorm behind each branch and norms of all queries and of all keys."""

    name: str = redefined(llama.RotaryConfig, "name", "olmo2_tiny")
    norm_epsilon: float = redefined(llama.RotaryConfig, "norm_epsilon", 1e-6)
    rope_theta: float = redefined(llama.RotaryConfig, "rope_theta", 5e5)
    head_norms = "all"
    branch_std = 0.02  # as of all weights, since the norm after a branch scales its output


@dataclass(frozen=True)
class Olmo2BlockSpec(llama.LlamaBlockSpec):
    """Attention and MLP, each with a norm of its output, added to the residual stream [T, H]."""

    def layers(self) -> dict[str, LayerSpec]:
        layers, behind = super().layers(), llama.branch_norm(self.config)
        return {"attention": layers["attention"], "attention_norm": behind, "mlp": layers["mlp"], "mlp_norm": behind}

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
        x_TH = layer.attention_norm(x_TH, await layer.attention(x_TH, tokens))
        return layer.mlp_norm(x_TH, await layer.mlp(x_TH))


def describe(config: Olmo2Config) -> Description:
    """Return the description of an OLMo 2."""
    return llama.describe_layers(config, Olmo2BlockSpec(config, llama.rotary(config)))


_LAYERS = llama.LAYERS | {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_TABLE = ModelTable("Olmo2ForCausalLM", _LAYERS, llama.SETTINGS, {"tied": False}, llama.SUPPORTED)
ADAPTER = TextAdapter(Olmo2Config, {"olmo2": _TABLE}, llama.read_settings, llama.write_settings)
FAMILY = text_family("olmo2", Olmo2Config, describe, ADAPTER, llama.check_layers)
