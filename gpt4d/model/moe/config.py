"""The settings of a mixture of experts."""

from dataclasses import dataclass, fields

from gpt4d.config import SIZE, Effect, redefined, setting
from gpt4d.model.llama.config import LlamaConfig, RotaryConfig

# Settings of the training, which a checkpoint's model may have with other values.
TRAINED_WITH = "balance_rate", "router_z_loss", "imbalance"


@dataclass
class MoeConfig(RotaryConfig):
    """A mixture of experts: a Llama whose MLPs are experts, such as OLMoE, Qwen3-MoE and Mixtral."""

    name: str = redefined(RotaryConfig, "name", "moe_tiny")
    inner: int = redefined(RotaryConfig, "inner", 96)
    experts: int = setting(8, "experts of a block", at_least=2, at_most=4096)
    experts_per_token: int = setting(2, "experts of each token", at_least=1, at_most=4096)
    shared_inner: int = setting(
        0, "features of an expert that every token uses in addition; 0: none", **(SIZE | {"at_least": 0})
    )
    router: str = setting("softmax", "scores of the experts", choices=("softmax", "sigmoid"))
    normalized_weights: bool = setting(True, "the weights of a token's experts add up to 1")
    balance: str = setting("loss", "how experts get equal loads: by a loss, or by biases", choices=("loss", "bias"))
    balance_rate: float = setting(0.01, "factor of the balance loss, or change of a bias per step", at_least=0)
    router_z_loss: float = setting(0.0, "factor of log²(Σ exp(router logits)) in the loss", at_least=0)
    imbalance: float = setting(
        1.0,
        "planner: tokens of the busiest rank's experts, divided by the mean (see moe in metrics.jsonl)",
        at_least=1,
        effect=Effect.NONE,
    )
    tied: bool = setting(False, "the head is the token embedding")
    qk_norm: str = setting("none", "norms of queries and keys", choices=("none", "heads", "all"))

    @property
    def llama(self) -> LlamaConfig:
        """The settings of a Llama with the same attention and norms."""
        own = {field.name for field in fields(LlamaConfig)} - {"qkv_bias", "qk_norm"}
        return LlamaConfig(**{key: getattr(self, key) for key in own}, qk_norm=self.qk_norm == "heads")
