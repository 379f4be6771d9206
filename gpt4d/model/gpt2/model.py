"""GPT-2, readable as a serial model: its layers decide where tensors live, and ``await`` where chunks take turns.

Shapes: B sequences, S positions, T tokens, H hidden, N hidden within the heads, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.model.description import Part
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.chunks import run_blocks
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.dropout import Dropout
from gpt4d.parallel.layers.embedding import PositionEmbedding, TokenEmbedding
from gpt4d.parallel.layers.linear import Head, Linear
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.layers.tokens import Tokens, tokens_of
from gpt4d.parallel.turns import run_alone
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        hidden, (axes, split) = config.hidden, head_split(config.heads, weights)
        self.qkv = Linear(weights, hidden, hidden, num_fused=3, inner_split=split)
        self.core = AttentionCore(config.heads, config.attention_dropout, axes)
        self.output = Linear(weights, hidden, hidden, transposed=True, std=residual_std, inner_split=split)

    async def forward(self, x_TH: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        mixed_TN = self.core(await self.qkv(x_TH), tokens)
        return await self.output(mixed_TN)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, weights: WeightStream, residual_std: float):
        super().__init__()
        self.up = Linear(weights, config.hidden, 4 * config.hidden)
        self.down = Linear(weights, 4 * config.hidden, config.hidden, transposed=True, std=residual_std)

    async def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return await self.down(F.gelu(await self.up(x_TH), approximate="tanh"))


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
        attended_TH = await self.attention(self.attention_norm(x_TH), tokens)
        x_TH = x_TH + self.attention_dropout(attended_TH, tokens)
        return x_TH + self.mlp_dropout(await self.mlp(self.mlp_norm(x_TH)), tokens)


class GPT(nn.Module):
    """A GPT-2, or parts of one, on the grid of ``weights``.

    Its values are not set until ``gpt4d.model.init.initialize``. Parts without the first have no embeddings, and parts
    without the last no head, which multiplies by the token embedding and so has a copy of it.
    """

    def __init__(self, config: GPT2Config, weights: WeightStream, parts: Sequence[Part]):
        super().__init__()
        self.config, self.weights, self.parts = config, weights, parts
        begins, ends = any(part.begins for part in parts), any(part.ends for part in parts)
        if begins or ends:
            self.tokens = TokenEmbedding(weights, config.padded_vocab_size, config.hidden)
        if begins:
            self.positions = PositionEmbedding(weights, config.max_positions, config.hidden)
            self.dropout = Dropout(config.dropout, weights.grid.y)
        self.blocks = nn.ModuleDict({str(index): Block(config, weights) for part in parts for index in part.blocks})
        if ends:
            self.norm = LayerNorm(weights, config.hidden, config.norm_epsilon)
            self.head = Head(weights)

    def forward(
        self,
        ids_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
        part: Part | None = None,
        received: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V], this rank's part of the padded vocabulary, which x splits.

        Args:
            ids_BS: this rank's sequences of token ids.
            sample_ids_B: their indices in the whole run, which dropout depends on.
            documents_BS: index of each token's document; attention and positions stay inside one. None: no limits.
            part: one of ``parts``; None if there is only one. Parts but the last return the residual stream [T, H].
            received: as for ``compute``.
        """
        tokens = tokens_of(self.weights, sample_ids_B, ids_BS.shape[1], documents_BS)
        part = part or self.parts[0]
        x_TH = self._stream(part, ids_BS, tokens, received or {})
        return tokens.restored(self._logits(x_TH)) if part.ends else x_TH

    def loss_sum(
        self,
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cross-entropy of a whole model, summed, not averaged, over this rank's tokens."""
        (part,) = self.parts
        return self.compute(part, {}, ids_BS, targets_BS, sample_ids_B, documents_BS)["loss"]

    def compute(
        self,
        part: Part,
        received: Mapping[str, torch.Tensor],
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the residual stream [T, H] after a part as ``stream``, or the ``loss`` of the last part.

        Args:
            part: one of ``parts``.
            received: the residual stream after the part before, as ``stream``; nothing for the first part.
            ids_BS: as for ``forward``.
            targets_BS: ids of the tokens to predict.
            sample_ids_B: as for ``forward``.
            documents_BS: as for ``forward``.
        """
        tokens = tokens_of(self.weights, sample_ids_B, ids_BS.shape[1], documents_BS)
        x_TH = self._stream(part, ids_BS, tokens, received)
        if not part.ends:
            return {"stream": x_TH}
        logits_TV, targets_T = self._logits(x_TH), tokens.gathered(targets_BS)
        return {"loss": cross_entropy_sum(logits_TV, targets_T, self.config.vocab_size, self.weights.grid.x)}

    def _stream(
        self, part: Part, ids_BS: torch.Tensor, tokens: Tokens, received: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the residual stream after the blocks of a part. No reference to the one before them stays behind."""
        blocks = [self.blocks[str(index)] for index in part.blocks]
        if part.begins:
            return run_blocks(self.weights, blocks, self._embedded(ids_BS, tokens), tokens)
        return run_blocks(self.weights, blocks, received["stream"], tokens)

    def _embedded(self, ids_BS: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.dropout(self.positions(self.tokens(ids_BS, tokens), tokens), tokens)

    def _logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] in the order of ``tokens.gathered``."""
        return run_alone(self.head(self.norm(x_TH), self.tokens.weight))
