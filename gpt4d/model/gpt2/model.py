"""GPT-2, readable as a serial model: its layers decide where tensors live, and ``await`` where chunks take turns.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads.
"""

from functools import partial

import torch
from torch import nn

from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.text import TextModel
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.dropout import Dropout
from gpt4d.parallel.layers.embedding import PositionEmbedding
from gpt4d.parallel.layers.gelu import gelu
from gpt4d.parallel.layers.linear import Linear
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.layers.tokens import Tokens
from gpt4d.parallel.recomputation import Recomputable, recomputable
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        hidden, (axes, split) = config.hidden, head_split(config.heads, weights)
        self.qkv = Linear(weights, hidden, hidden, num_fused=3, inner_split=split)
        self.core = AttentionCore(config.heads, config.attention_dropout, axes)
        self.output = Linear(weights, hidden, hidden, transposed=True, std=residual_std, inner_split=split)

    async def forward(self, x_TH: torch.Tensor | Recomputable, tokens: Tokens) -> torch.Tensor:
        mixed_TN = self.core.of_fused(await self.qkv(x_TH), tokens)
        return await self.output(mixed_TN)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        self.weights = weights
        self.up = Linear(weights, config.hidden, 4 * config.hidden, bias_gradient=False)
        self.down = Linear(weights, 4 * config.hidden, config.hidden, transposed=True, std=residual_std)

    async def forward(self, x_TH: torch.Tensor | Recomputable) -> torch.Tensor:
        activation = partial(gelu, bias=self.up.get_parameter("bias"))
        return await self.down(recomputable(self.weights, activation, await self.up(x_TH)))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream):
        super().__init__()
        # 2·layers outputs add up in the residual stream: scaled so that their sum keeps its size (GPT-2).
        residual_std = 0.02 / (2 * config.layers) ** 0.5
        self.attention_norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.attention = Attention(config, weights, residual_std)
        self.attention_dropout = Dropout(config.dropout, weights.grid.y)
        self.mlp_norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.mlp = MLP(config, weights, residual_std)
        self.mlp_dropout = Dropout(config.dropout, weights.grid.y)

    async def forward(self, x_TH: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x_TH, normal_TH = self.attention_norm(x_TH)
        attended_TH = self.attention_dropout(await self.attention(normal_TH, tokens), tokens)
        x_TH, normal_TH = self.mlp_norm(x_TH, attended_TH)
        return x_TH + self.mlp_dropout(await self.mlp(normal_TH), tokens)


class GPT(TextModel):
    """A GPT-2, or parts of one (gpt4d.model.text)."""

    config: GPT2Config

    def _build_positions(self) -> None:
        self.positions = PositionEmbedding(self.weights, self.config.max_positions, self.config.hidden)
        self.dropout = Dropout(self.config.dropout, self.weights.grid.y)

    def _build_block(self) -> nn.Module:
        return Block(self.config, self.weights)

    def _build_norm(self) -> LayerNorm:
        return LayerNorm(self.weights, self.config.hidden, self.config.norm_epsilon)

    def _embedded(self, ids_BS: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.dropout(self.positions(self.tokens(ids_BS, tokens), tokens), tokens)
