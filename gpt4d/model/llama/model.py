"""Llama, Qwen2 and Qwen3, readable as serial models: their layers decide where tensors live.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads, h heads, s size of a head.
"""

from functools import cached_property

import torch
from torch import nn

from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.llama.description import BlockSpecs, block_specs, final_norm
from gpt4d.model.llama.frequencies import frequencies, scale
from gpt4d.model.text import TextModel
from gpt4d.parallel.layers.activations import SwigluFunction
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.concatenation import separate
from gpt4d.parallel.layers.grouped_heads import KeyValueHeads
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.rotary import Rotary
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.recomputation import Recomputable, recomputable
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, specs: BlockSpecs, weights: WeightStream, rotary: Rotary):
        super().__init__()
        self.channels, self.pieces, self.size, self.rotary = (
            config.qkv_channels,
            config.head_parts,
            config.head_size,
            rotary,
        )
        axes = head_split(config.head_parts, weights)
        self.qkv = Layer(specs.qkv, weights)
        self.key_value_heads = KeyValueHeads(config.heads, config.key_value_heads, axes)
        self.q_norm = self.k_norm = None
        if specs.head_norm:
            self.q_norm, self.k_norm = Layer(specs.head_norm, weights), Layer(specs.head_norm, weights)
        self.core = AttentionCore(config.heads, 0.0, axes)
        self.output = Layer(specs.output, weights)

    async def forward(self, x_TH: torch.Tensor | Recomputable, tokens: Tokens) -> torch.Tensor:
        qkv_BSN = (await self.qkv(x_TH)).unflatten(0, (-1, tokens.length))
        q_BSN, k_BSN, v_BSN = separate(qkv_BSN, self.channels, self.pieces)
        q_BShs = q_BSN.unflatten(-1, (-1, self.size))
        k_BShs, v_BShs = await self.key_value_heads(k_BSN, v_BSN)
        if self.q_norm is not None and self.k_norm is not None:
            q_BShs, k_BShs = self.q_norm(q_BShs), self.k_norm(k_BShs)
        mixed_TN = self.core(self.rotary(q_BShs, tokens), self.rotary(k_BShs, tokens), v_BShs, tokens)
        return await self.output(mixed_TN)


class MLP(nn.Module):
    def __init__(self, specs: BlockSpecs, weights: WeightStream):
        super().__init__()
        self.weights = weights
        self.up, self.down = Layer(specs.up, weights), Layer(specs.down, weights)

    async def forward(self, x_TH: torch.Tensor | Recomputable) -> torch.Tensor:
        return await self.down(recomputable(self.weights, SwigluFunction.apply, await self.up(x_TH)))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, weights: WeightStream, rotary: Rotary):
        super().__init__()
        specs = block_specs(config)
        self.attention_norm = Layer(specs.norm, weights)
        self.attention = Attention(config, specs, weights, rotary)
        self.mlp_norm = Layer(specs.norm, weights)
        self.mlp = MLP(specs, weights)

    async def forward(self, x_TH: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x_TH, normal_TH = self.attention_norm(x_TH)
        x_TH, normal_TH = self.mlp_norm(x_TH, await self.attention(normal_TH, tokens))
        return x_TH + await self.mlp(normal_TH)


class Llama(TextModel):
    """A Llama, or parts of one (gpt4d.model.text)."""

    config: LlamaConfig

    @cached_property
    def _rotary(self) -> Rotary:
        return Rotary(frequencies(self.config), scale(self.config))

    def _build_block(self) -> nn.Module:
        return Block(self.config, self.weights, self._rotary)

    def _build_norm(self) -> Layer:
        return Layer(final_norm(self.config), self.weights)
