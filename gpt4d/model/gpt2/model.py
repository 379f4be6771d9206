"""GPT-2, readable as a serial model: its layers decide where tensors live, and ``await`` where chunks take turns.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads.
"""

from functools import partial

import torch
from torch import nn

from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.gpt2.description import BlockSpecs, block_specs, final_norm, positions
from gpt4d.model.text import TextModel
from gpt4d.parallel.layers.activations import gelu_of_biased
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.dropout import DropoutSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.recomputation import Recomputable, recomputable
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, specs: BlockSpecs, weights: WeightStream):
        super().__init__()
        self.qkv = Layer(specs.qkv, weights)
        self.core = AttentionCore(config.heads, config.attention_dropout, head_split(config.heads, weights))
        self.output = Layer(specs.output, weights)

    async def forward(self, x_TH: torch.Tensor | Recomputable, tokens: Tokens) -> torch.Tensor:
        mixed_TN = self.core.of_fused(await self.qkv(x_TH), tokens)
        return await self.output(mixed_TN)


class MLP(nn.Module):
    def __init__(self, specs: BlockSpecs, weights: WeightStream):
        super().__init__()
        self.weights = weights
        self.up, self.down = Layer(specs.up, weights), Layer(specs.down, weights)

    async def forward(self, x_TH: torch.Tensor | Recomputable) -> torch.Tensor:
        activation = partial(gelu_of_biased, bias=self.up.get_parameter("bias"))
        return await self.down(recomputable(self.weights, activation, await self.up(x_TH)))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream):
        super().__init__()
        specs = block_specs(config)
        self.attention_norm = Layer(specs.norm, weights)
        self.attention = Attention(config, specs, weights)
        self.attention_dropout = Layer(DropoutSpec(config.dropout), weights)
        self.mlp_norm = Layer(specs.norm, weights)
        self.mlp = MLP(specs, weights)
        self.mlp_dropout = Layer(DropoutSpec(config.dropout), weights)

    async def forward(self, x_TH: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x_TH, normal_TH = self.attention_norm(x_TH)
        attended_TH = self.attention_dropout(await self.attention(normal_TH, tokens), tokens)
        x_TH, normal_TH = self.mlp_norm(x_TH, attended_TH)
        return x_TH + self.mlp_dropout(await self.mlp(normal_TH), tokens)


class GPT(TextModel):
    """A GPT-2, or parts of one (gpt4d.model.text)."""

    config: GPT2Config

    def _build_positions(self) -> None:
        self.positions = Layer(positions(self.config), self.weights)
        self.dropout = Layer(DropoutSpec(self.config.dropout), self.weights)

    def _build_block(self) -> nn.Module:
        return Block(self.config, self.weights)

    def _build_norm(self) -> Layer:
        return Layer(final_norm(self.config), self.weights)

    def _embedded(self, ids_BS: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.dropout(self.positions(self.tokens(ids_BS, tokens), tokens), tokens)
