"""The common part of models of text: token ids → blocks → logits or the loss, in one part or several.

Shapes: B sequences, S positions, T tokens, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpt4d.model.description import Part
from gpt4d.model.text_config import TextConfig, head, token_embedding
from gpt4d.parallel.chunks import run_blocks
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.head_loss import head_loss
from gpt4d.parallel.layers.key_value_cache import KeyValueCache
from gpt4d.parallel.layers.linear import TiedHeadSpec
from gpt4d.parallel.layers.loss import cross_entropy_sum
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.tokens import Tokens, tokens_of
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.turns import run_alone
from gpt4d.parallel.weights import WeightStream


class TextModel(nn.Module, ABC):
    """A model of text, or parts of one, on the grid of ``weights``.

    Its values are not set until ``gpt4d.model.init.initialize``. Parts without the first have no embeddings, and parts
    without the last no head. A tied head has a copy of the token embedding.
    """

    def __init__(self, config: TextConfig, weights: WeightStream, parts: Sequence[Part]):
        super().__init__()
        self.config, self.weights, self.parts = config, weights, parts
        begins, ends = any(part.begins for part in parts), any(part.ends for part in parts)
        if begins or (ends and config.tied):
            self.tokens = Layer(token_embedding(config), weights)
        if begins:
            self._build_positions()
        self.blocks = nn.ModuleDict({str(index): self._build_block() for part in parts for index in part.blocks})
        if ends:
            self.norm = self._build_norm()
            self.head = Layer(TiedHeadSpec() if config.tied else head(config), weights)

    def _build_positions(self) -> None:
        """Build the modules that ``_embedded`` applies to the vectors of tokens."""

    @abstractmethod
    def _build_block(self) -> nn.Module:
        """Return a block: a coroutine from the residual stream and the tokens to the residual stream."""

    @abstractmethod
    def _build_norm(self) -> Layer:
        """Return the norm before the head."""

    def forward(
        self,
        ids_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents: Documents | None = None,
        part: Part | None = None,
        received: Mapping[str, torch.Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V], this rank's part of the padded vocabulary, which x splits.

        Args:
            ids_BS: this rank's sequences of token ids.
            sample_ids_B: their indices in the whole run, which dropout depends on.
            documents: attention and positions stay inside one. None: no limits.
            part: one of ``parts``; None if there is only one. Parts but the last return the residual stream [T, H].
            received: as for ``compute``.
            cache: of the tokens before these, which has begun a forward of these.
        """
        tokens = tokens_of(self.weights, sample_ids_B, ids_BS.shape[1], documents, cache)
        part = part or self.parts[0]
        x_TH = self._stream(part, ids_BS, tokens, received or {})
        return tokens.restored(self._logits(x_TH)) if part.ends else x_TH

    def loss_sum(
        self,
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Return the cross-entropy of a whole model, summed, not averaged, over this rank's tokens."""
        (part,) = self.parts
        return self.compute(part, {}, ids_BS, targets_BS, sample_ids_B, documents)["loss"]

    def compute(
        self,
        part: Part,
        received: Mapping[str, torch.Tensor],
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        sample_ids_B: torch.Tensor,
        documents: Documents | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the residual stream [T, H] after a part as ``stream``, or the ``loss`` of the last part.

        Args:
            part: one of ``parts``.
            received: the residual stream after the part before, as ``stream``; nothing for the first part.
            ids_BS: as for ``forward``.
            targets_BS: ids of the tokens to predict.
            sample_ids_B: as for ``forward``.
            documents: as for ``forward``.
        """
        tokens = tokens_of(self.weights, sample_ids_B, ids_BS.shape[1], documents)
        x_TH = self._stream(part, ids_BS, tokens, received)
        if not part.ends:
            return {"stream": x_TH}
        targets_T, vocabulary, chunks = tokens.gathered(targets_BS), self.config.vocab_size, self.weights.loss_chunks
        if chunks == 1:
            return {"loss": cross_entropy_sum(self._logits(x_TH), targets_T, vocabulary, self.weights.grid.x)}
        layer: Any = self.head
        weight: Any = self.tokens.weight if self.config.tied else layer.weight
        _, normal_TH = self.norm(x_TH)
        normal_TH = normal_TH.value if isinstance(normal_TH, Recomputable) else normal_TH  # the loss keeps no input
        return {"loss": head_loss(normal_TH, weight, targets_T, vocabulary, layer.product, chunks)}

    def _stream(
        self, part: Part, ids_BS: torch.Tensor, tokens: Tokens, received: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the residual stream after the blocks of a part. No reference to the one before them stays behind."""
        blocks = [self.blocks[str(index)] for index in part.blocks]
        if part.begins:
            return run_blocks(self.weights, blocks, self._embedded(ids_BS, tokens), tokens)
        return run_blocks(self.weights, blocks, received["stream"], tokens)

    def _embedded(self, ids_BS: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.tokens(ids_BS, tokens)

    def _logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] in the order of ``tokens.gathered``."""
        tied = (self.tokens.weight,) if self.config.tied else ()
        return run_alone(self.head(self.norm(x_TH)[1], *tied))
