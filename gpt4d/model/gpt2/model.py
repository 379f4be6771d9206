"""GPT-2, readable as a serial model: its layers decide where tensors live.

Shapes: B sequences, S positions, H hidden, N hidden within the heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.layers.attention import CausalAttention
from gpt4d.parallel.layers.dropout import Dropout
from gpt4d.parallel.layers.embedding import PositionEmbedding, TokenEmbedding
from gpt4d.parallel.layers.linear import Head, Linear
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        self.qkv = Linear(weights, config.hidden, config.hidden, num_fused=3)
        self.core = CausalAttention(config.heads, config.attention_dropout, weights.grid.x)
        self.output = Linear(weights, config.hidden, config.hidden, transposed=True, std=residual_std)

    def forward(self, x_BSH: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: torch.Tensor | None):
        mixed_BSN = self.core(self.qkv(x_BSH), sample_ids_B, documents_BS)
        return self.output(mixed_BSN)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        self.up = Linear(weights, config.hidden, 4 * config.hidden)
        self.down = Linear(weights, 4 * config.hidden, config.hidden, transposed=True, std=residual_std)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BSH), approximate="tanh"))


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

    def forward(self, x_BSH: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: torch.Tensor | None = None):
        attended = self.attention(self.attention_norm(x_BSH), sample_ids_B, documents_BS)
        x_BSH = x_BSH + self.attention_dropout(attended, sample_ids_B)
        return x_BSH + self.mlp_dropout(self.mlp(self.mlp_norm(x_BSH)), sample_ids_B)


class GPT(nn.Module):
    """A GPT-2 on the grid of ``weights``. Its values are not set until ``gpt4d.model.init.initialize``."""

    def __init__(self, config: GPT2Config, weights: WeightStream):
        super().__init__()
        self.config, self.weights = config, weights
        self.tokens = TokenEmbedding(weights, config.padded_vocab_size, config.hidden)
        self.positions = PositionEmbedding(weights, config.max_positions, config.hidden)
        self.dropout = Dropout(config.dropout, weights.grid.y)
        self.blocks = nn.ModuleList(Block(config, weights) for _ in range(config.layers))
        self.norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.head = Head(weights)

    def forward(
        self, ids_BS: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [B, S, V]: this rank's part of the padded vocabulary, which x splits.

        Args:
            ids_BS: this rank's sequences of token ids.
            sample_ids_B: their indices in the whole run, which dropout depends on.
            documents_BS: index of each token's document; attention and positions stay inside one. None: no limits.
        """
        x_BSH = self.tokens(ids_BS) + self.positions(*ids_BS.shape, documents_BS)
        x_BSH = self.dropout(x_BSH, sample_ids_B)
        for block in self.blocks:
            x_BSH = self.weights.run_block(block, x_BSH, sample_ids_B, documents_BS)
        return self.head(self.norm(x_BSH), self.tokens.weight)

    def loss_sum(
        self,
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cross-entropy summed, not averaged, over this rank's tokens."""
        logits_BSV = self(ids_BS, sample_ids_B, documents_BS)
        return cross_entropy_sum(logits_BSV, targets_BS, self.config.vocab_size, self.weights.grid.x)
