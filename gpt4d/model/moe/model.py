"""Mixtures of experts, written like serial models: their layers determine the sharding. No torch here.

Shapes: T tokens, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import Divisibility
from gpt4d.model.description import EXPERTS, Description
from gpt4d.model.llama.frequencies import frequencies, scale
from gpt4d.model.llama.model import LlamaAttentionSpec, LlamaBlockSpec, LlamaMLPSpec, norm, residual_std
from gpt4d.model.llama.model import describe as describe_llama
from gpt4d.model.moe.config import MoeConfig
from gpt4d.model.olmo2.model import Olmo2AttentionSpec
from gpt4d.model.text import TextModelSpec
from gpt4d.parallel.layers.experts import ExpertsSpec
from gpt4d.parallel.layers.heads import Rotary
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Recomputable
from gpt4d.parallel.layers.routing import RouterSpec, Scoring
from gpt4d.parallel.layers.sequence import TokenIndex


@dataclass(frozen=True)
class MixtureSpec(LayerSpec):
    """A router, its experts, and an expert that every token uses: [T, H] to [T, H]."""

    config: MoeConfig

    def layers(self) -> dict[str, LayerSpec]:
        config = self.config
        scoring = Scoring(config.experts_per_token, config.router == "sigmoid", config.normalized_weights)
        layers: dict[str, LayerSpec] = {
            "router": RouterSpec(
                config.hidden,
                config.experts,
                scoring,
                config.layers,
                config.balance,
                config.balance_rate,
                config.router_z_loss,
            ),
            "experts": ExpertsSpec(config.hidden, config.inner, config.experts, down_std=residual_std(config.llama)),
        }
        if config.shared_inner:
            layers["shared"] = LlamaMLPSpec(replace(config.llama, inner=config.shared_inner))
        return layers

    async def forward(self, layer: BoundLayer, given: Any, tokens: TokenIndex) -> Any:
        x_TH = given.value if isinstance(given, Recomputable) else given  # saved, because several layers use it
        routing = await layer.router(x_TH, tokens)
        shared = layer.shared(x_TH) if self.config.shared_inner else None
        return await layer.experts(x_TH, routing, shared)


@dataclass(frozen=True)
class MoeBlockSpec(LlamaBlockSpec):
    """A block of a Llama with a mixture in place of the MLP."""

    mixture: MoeConfig

    def layers(self) -> dict[str, LayerSpec]:
        attention = Olmo2AttentionSpec if self.mixture.qk_norm == "all" else LlamaAttentionSpec
        return super().layers() | {
            "attention": attention(self.config, self.rotary),
            "mlp": MixtureSpec(self.mixture),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any, tokens: TokenIndex) -> Any:
        x_TH, normal_TH = layer.attention_norm(x_TH)
        x_TH, normal_TH = layer.mlp_norm(x_TH, await layer.attention(normal_TH, tokens))
        return x_TH + await layer.mlp(normal_TH, tokens)


def model(config: MoeConfig) -> TextModelSpec:
    """Return the spec of a mixture of experts."""
    llama = config.llama
    rotary = Rotary(frequencies(llama), scale(llama))
    return TextModelSpec(config, MoeBlockSpec(llama, rotary, config), norm(llama), {})


def describe(config: MoeConfig) -> Description:
    """Return the description of a mixture of experts."""
    llama = describe_llama(config.llama)
    rules = [rule for rule in llama.rules if rule.quantity != "model.inner"]
    rules += [
        Divisibility(EXPERTS, config.experts, ("z",)),
        Divisibility("model.inner", config.inner, ("x",)),
    ]
    if config.shared_inner:
        rules.append(Divisibility("model.shared_inner", config.shared_inner, ("x", "z")))
    unused = config.layers * (config.experts - config.experts_per_token) * 3 * config.hidden * config.inner
    return replace(
        llama,
        unused_parameters=unused,
        imbalance=config.imbalance,
        model=model(config).of_parts,
        rules=tuple(rules),
    )
