"""Mixtures of experts with the attention of a Llama: OLMoE, Qwen3-MoE, Mixtral. No torch here.

Shapes: T tokens, H hidden.
"""

from dataclasses import dataclass, replace

from gpt4d.config import SIZE, Config, ConfigError, Divisibility, Effect, redefined, setting
from gpt4d.model import llama
from gpt4d.model.description import Description
from gpt4d.model.hugging_face import ModelTable, TextAdapter
from gpt4d.model.parts import EXPERTS
from gpt4d.model.text import text_family
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.experts import ExpertsSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Input, Recomputable
from gpt4d.parallel.layers.routing import RouterSpec, Scoring
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass
class MoeConfig(llama.RotaryConfig):
    """A mixture of experts: a Llama whose MLPs are experts, such as OLMoE, Qwen3-MoE and Mixtral."""

    name: str = redefined(llama.RotaryConfig, "name", "moe_tiny")
    inner: int = redefined(llama.RotaryConfig, "inner", 96)
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

    # The last settings are those of the training, which a checkpoint's model may have with other values.
    unstructured = llama.RotaryConfig.unstructured | {"balance_rate", "router_z_loss", "imbalance"}

    @property
    def head_norms(self) -> str:
        return self.qk_norm


_ADAPTED = "qkv", "output"  # layers that can have adapters


def check(config: Config) -> None:
    """Raise ConfigError for a mixture that is impossible on any grid."""
    llama.check_layers(config)
    model = config.model
    assert isinstance(model, MoeConfig)
    if model.experts_per_token > model.experts:
        raise ConfigError(
            f"model.experts_per_token={model.experts_per_token}: more than model.experts={model.experts}; lower it"
        )
    if model.lora is not None and not set(model.lora.targets) <= set(_ADAPTED):
        raise ConfigError(
            f"lora.targets=[{','.join(model.lora.targets)}]: adapters of experts are not supported; set "
            f"lora.targets=[{','.join(_ADAPTED)}], which are layers of attention"
        )


@dataclass(frozen=True)
class MixtureSpec(LayerSpec):
    """A router, its experts, and an expert that every token uses: [T, H] to [T, H]."""

    config: MoeConfig

    def layers(self) -> dict[str, LayerSpec]:
        config = self.config
        scoring = Scoring(config.experts_per_token, config.router == "sigmoid", config.normalized_weights)
        balance = config.balance, config.balance_rate, config.router_z_loss
        layers: dict[str, LayerSpec] = {
            "router": RouterSpec(config.hidden, config.experts, scoring, config.layers, *balance),
            "experts": ExpertsSpec(config.hidden, config.inner, config.experts, down_std=config.branch_std),
        }
        if config.shared_inner:
            layers["shared"] = llama.LlamaMLPSpec(replace(config, inner=config.shared_inner))
        return layers

    async def forward(self, layer: BoundLayer, given: Input, tokens: TokenIndex) -> Tensor:
        x_TH = given.value if isinstance(given, Recomputable) else given  # saved, because several layers use it
        routing = await layer.router(x_TH, tokens)
        shared = layer.shared(x_TH) if self.config.shared_inner else None
        return await layer.experts(x_TH, routing, shared)


@dataclass(frozen=True)
class MoeBlockSpec(llama.LlamaBlockSpec):
    """A block of a Llama with a mixture in place of the MLP."""

    config: MoeConfig

    def layers(self) -> dict[str, LayerSpec]:
        return super().layers() | {"mlp": MixtureSpec(self.config)}

    async def forward(self, layer: BoundLayer, x_TH: Tensor, tokens: TokenIndex) -> Tensor:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        x_TH, normal_TH = layer.mlp_norm(x_TH, await layer.attention(normal_TH, tokens))
        return x_TH + await layer.mlp(normal_TH, tokens)


def describe(config: MoeConfig) -> Description:
    """Return the description of a mixture of experts."""
    layers = llama.describe_layers(config, MoeBlockSpec(config, llama.rotary(config)))
    rules = [rule for rule in layers.rules if rule.quantity != "model.inner"]
    rules += [Divisibility(EXPERTS, config.experts, ("z",)), Divisibility("model.inner", config.inner, ("x",))]
    if config.shared_inner:
        rules.append(Divisibility("model.shared_inner", config.shared_inner, ("x", "z")))
    unused = config.layers * (config.experts - config.experts_per_token) * 3 * config.hidden * config.inner
    return replace(layers, unused_parameters=unused, imbalance=config.imbalance, rules=tuple(rules))


_LAYERS = llama.LAYERS | {
    "mlp.router": "mlp.gate",
    "mlp.router.state": "",
    "mlp.experts.up": "mlp.experts.*.gate_proj.weight mlp.experts.*.up_proj.weight",
    "mlp.experts.down": "mlp.experts.*.down_proj.weight",
}
_MIXTRAL_LAYERS = _LAYERS | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.up": "block_sparse_moe.experts.*.w1.weight block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.*.w2.weight",
}
_SETTINGS = llama.SETTINGS | {"num_experts_per_tok": "experts_per_token", "router_aux_loss_coef": "balance_rate"}
_OLMOE = _SETTINGS | {"num_experts": "experts", "norm_topk_prob": "normalized_weights"}
_MIXTRAL = _SETTINGS | {"num_local_experts": "experts"}
_QWEN3 = _MIXTRAL | {"norm_topk_prob": "normalized_weights", "moe_intermediate_size": "inner"}
_FIXED = {"shared_inner": 0, "router": "softmax", "balance": "loss"}
_SUPPORTED = llama.SUPPORTED | {
    "clip_qkv": (None,),
    "sliding_window": (None,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
_KINDS = {
    "mixtral": ModelTable(
        "MixtralForCausalLM",
        _MIXTRAL_LAYERS,
        _MIXTRAL,
        _FIXED | {"normalized_weights": True, "qk_norm": "none"},
        _SUPPORTED,
    ),
    "olmoe": ModelTable("OlmoeForCausalLM", _LAYERS, _OLMOE, _FIXED | {"qk_norm": "all"}, _SUPPORTED),
    "qwen3_moe": ModelTable("Qwen3MoeForCausalLM", _LAYERS, _QWEN3, _FIXED | {"qk_norm": "heads"}, _SUPPORTED),
}
ADAPTER = TextAdapter(MoeConfig, _KINDS, llama.read_settings, llama.write_settings)
FAMILY = text_family("moe", MoeConfig, describe, ADAPTER, check)
