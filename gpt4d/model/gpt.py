"""GPT-2, readable as a serial model: where its tensors live is the layers' business.

Shapes: B sequences, S positions, H hidden, N hidden within the heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt4d.config import ModelConfig
from gpt4d.parallel.layers.attention import CausalAttention
from gpt4d.parallel.layers.dropout import Dropout
from gpt4d.parallel.layers.embedding import PositionEmbedding, TokenEmbedding
from gpt4d.parallel.layers.linear import Head, Linear
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.weights import WeightStream

Documents = torch.Tensor | None  # which document of its sequence each token is of; None: all of one


def documents(ids_BS: torch.Tensor, end: int) -> torch.Tensor:
    """Of each token, how many documents of its sequence end before it: [B, S]."""
    ends = (ids_BS == end).long()
    return ends.cumsum(1) - ends


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, weights: WeightStream, residual_std: float):
        super().__init__()
        self.qkv = Linear(weights, config.hidden, config.hidden, parts=3)
        self.core = CausalAttention(config.heads, config.attention_dropout, weights.grid.x)
        self.output = Linear(weights, config.hidden, config.hidden, transposed=True, std=residual_std)

    def forward(self, x_BSH: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: Documents) -> torch.Tensor:
        mixed_BSN = self.core(self.qkv(x_BSH), sample_ids_B, documents_BS)
        return self.output(mixed_BSN)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, weights: WeightStream, residual_std: float):
        super().__init__()
        self.up = Linear(weights, config.hidden, 4 * config.hidden)
        self.down = Linear(weights, 4 * config.hidden, config.hidden, transposed=True, std=residual_std)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BSH), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, weights: WeightStream):
        super().__init__()
        # The 2·layers outputs that add up in the residual stream: scaled so that their sum keeps its size (GPT-2).
        residual_std = 0.02 / (2 * config.layers) ** 0.5
        self.attention_norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.attention = Attention(config, weights, residual_std)
        self.attention_dropout = Dropout(config.dropout, weights.grid.y)
        self.mlp_norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.mlp = MLP(config, weights, residual_std)
        self.mlp_dropout = Dropout(config.dropout, weights.grid.y)

    def forward(self, x_BSH: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: Documents = None) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x_BSH), sample_ids_B, documents_BS)
        x_BSH = x_BSH + self.attention_dropout(attended, sample_ids_B)
        return x_BSH + self.mlp_dropout(self.mlp(self.mlp_norm(x_BSH)), sample_ids_B)


class GPT(nn.Module):
    """A GPT-2 on the grid of ``weights``. Its values are unset until ``gpt4d.model.init.initialize``.

    ``recompute``: keep only each block's input for the backward and compute the block again there (full activation
    checkpointing). ``cache_layers``: of so many blocks, the last ones, the gathered weights stay from the forward to
    the backward; they are the first that the backward comes to. ``document_end``: the token after which attention and
    positions begin anew.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightStream,
        recompute: bool = False,
        cache_layers: int = 0,
        document_end: int | None = None,
    ):
        super().__init__()
        self.config, self.weights, self.recompute, self.document_end = config, weights, recompute, document_end
        self.tokens = TokenEmbedding(weights, config.padded_vocab_size, config.hidden)
        self.positions = PositionEmbedding(weights, config.max_positions, config.hidden)
        self.dropout = Dropout(config.dropout, weights.grid.y)
        self.blocks = nn.ModuleList(Block(config, weights) for _ in range(config.layers))
        self.norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
        self.head = Head(weights)
        for block in self.blocks[config.layers - cache_layers :]:
            weights.cache(block)

    def forward(self, ids_BS: torch.Tensor, sample_ids_B: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V]: this rank's part of the padded vocabulary, which x splits.

        ``ids_BS`` are this rank's sequences, ``sample_ids_B`` their running numbers in the whole run, which dropout
        depends on.
        """
        documents_BS = None if self.document_end is None else documents(ids_BS, self.document_end)
        x_BSH = self.tokens(ids_BS) + self.positions(ids_BS.shape[1], documents_BS)
        x_BSH = self.dropout(x_BSH, sample_ids_B)
        x_BSH = self.through_blocks(x_BSH, sample_ids_B, documents_BS)
        return self.head(self.norm(x_BSH), self.tokens.weight)

    def through_blocks(
        self, x_BSH: torch.Tensor, sample_ids_B: torch.Tensor, documents_BS: Documents = None
    ) -> torch.Tensor:
        """The residual stream after all blocks, of the same shape."""
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                # No state to preserve: dropout is a function of its place, not of a generator.
                x_BSH = checkpoint(
                    block,
                    x_BSH,
                    sample_ids_B,
                    documents_BS,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=self.weights.checkpoint_contexts,
                )
            else:
                x_BSH = block(x_BSH, sample_ids_B, documents_BS)
        return x_BSH

    def loss_sum(self, ids_BS: torch.Tensor, targets_BS: torch.Tensor, sample_ids_B: torch.Tensor) -> torch.Tensor:
        """Cross-entropy summed, not averaged, over this rank's tokens."""
        logits_BSV = self(ids_BS, sample_ids_B)
        return cross_entropy_sum(logits_BSV, targets_BS, self.config.vocab_size, self.weights.grid.x)
