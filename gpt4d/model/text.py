"""Base of all text models: token ids → blocks → logits or the loss, in one part or several. No torch here.

Shapes: B sequences, S positions, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpt4d.model.description import STREAM
from gpt4d.model.parts import Part
from gpt4d.model.spec import ModelSpec
from gpt4d.model.text_config import head, token_embedding
from gpt4d.parallel.engine.interleave import Node, join, run_alone, run_graph
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import TiedHeadSpec
from gpt4d.parallel.layers.loss import cross_entropy_sum, head_loss
from gpt4d.parallel.layers.product import Recomputable
from gpt4d.parallel.layers.sequence import TokenIndex, tokens_of


@dataclass(frozen=True)
class TextModelSpec(ModelSpec):
    """A text model, or parts of one.

    Only the first part has embeddings, and only the last part has a head. A tied head has a copy of the token
    embedding.

    Attributes:
        config: the settings of the model, which implement ``TextConfig``.
        block: its blocks, each a coroutine from the residual stream [T, H] and the tokens to the residual stream.
        norm: the norm before the head.
        embeddings: layers after the token embedding, each from the residual stream and the tokens to the stream.
        parts: the parts of the model.
    """

    config: Any
    block: LayerSpec
    norm: LayerSpec
    embeddings: Mapping[str, LayerSpec]
    parts: tuple[Part, ...] = ()

    def layers(self) -> dict[str, LayerSpec]:
        config = self.config
        begins, ends = any(part.begins for part in self.parts), any(part.ends for part in self.parts)
        layers: dict[str, LayerSpec] = {}
        if begins or (ends and config.tied):
            layers["tokens"] = token_embedding(config)
        if begins:
            layers |= self.embeddings
        layers["blocks"] = LayersSpec({str(index): self.block for part in self.parts for index in part.blocks})
        if ends:
            layers |= {"norm": self.norm, "head": TiedHeadSpec() if config.tied else head(config)}
        return layers

    def forward(
        self,
        model: BoundLayer,
        ids_BS: Any,
        sample_ids_B: Any,
        documents: Any = None,
        part: Part | None = None,
        received: Mapping[str, Any] | None = None,
        cache: Any = None,
    ) -> Any:
        """Return logits [B, S, V], this rank's part of the padded vocabulary, which x splits.

        Args:
            model: the layer of this spec.
            ids_BS: this rank's sequences of token ids; segments of them if ``cache`` is not ``complete``.
            sample_ids_B: their indices in the run, which dropout depends on.
            documents: limits of attention and positions; None: no limits.
            part: one of ``parts``; None if there is only one. Parts but the last return the residual stream [T, H].
            received: as for ``compute``.
            cache: the key-value cache of earlier tokens, whose ``begin`` was called for these tokens.
        """
        complete = cache is None or cache.complete
        tokens = tokens_of(model, sample_ids_B, ids_BS.shape[1], documents, cache, complete)
        part = part or self.parts[0]
        x_TH = self._stream(model, part, ids_BS, tokens, received or {})
        return tokens.restored(self._logits(model, x_TH)) if part.ends else x_TH

    def compute(
        self,
        model: BoundLayer,
        part: Part,
        received: Mapping[str, Any],
        ids_BS: Any,
        targets_BS: Any,
        sample_ids_B: Any,
        documents: Any = None,
        masked: bool = False,
        with_token_losses: bool = False,
    ) -> dict[str, Any]:
        """Return the residual stream [T, H] after a part as ``stream``, or the ``loss`` of the last part.

        The loss is the cross-entropy, summed, not averaged, over this rank's tokens with a target. Its gradient
        includes the z-loss (``train.z_loss``).
        ``with_token_losses`` adds the loss of each token as ``token_losses`` [B, S], without a gradient.
        With ``parallel.context``, S are the positions of this rank's segments of each sequence.

        Args:
            model: the layer of this spec.
            part: one of ``parts``.
            received: the residual stream after the part before, as ``stream``; nothing for the first part.
            ids_BS: as for ``forward``.
            targets_BS: ids of the tokens to predict.
            sample_ids_B: as for ``forward``.
            documents: as for ``forward``, of complete sequences.
            masked: tokens with a negative target have no target.
            with_token_losses: also return the losses of the tokens.
        """
        tokens = tokens_of(model, sample_ids_B, ids_BS.shape[1], documents, complete=False)
        x_TH = self._stream(model, part, ids_BS, tokens, received)
        if not part.ends:
            return {STREAM: x_TH}
        targets_T, vocabulary, chunks = tokens.gathered(targets_BS), self.config.vocab_size, model.context.loss_chunks
        losses: list[Any] | None = [] if with_token_losses else None
        if chunks == 1:
            logits = self._logits(model, x_TH)
            del x_TH
            loss = cross_entropy_sum(
                logits, targets_T, vocabulary, model.context.grid.x, model.context.z_loss, masked, losses
            )
        else:
            weight = model.tokens.weight if self.config.tied else model.head.weight
            _, normal_TH = model.norm(x_TH)
            normal_TH = normal_TH.value if isinstance(normal_TH, Recomputable) else normal_TH  # the loss saves no input
            head, current = model.head.product, model.current_pass
            loss = head_loss(normal_TH, weight, targets_T, vocabulary, head, current, chunks, masked, losses)
        return {"loss": loss, **({"token_losses": tokens.restored(join(*losses))} if losses else {})}

    def planned_batch(self, tensor: Callable[..., Any], samples: int, length: int) -> tuple[Any, ...]:
        return (*(tensor((samples, length), "int64") for _ in range(2)), tensor((samples,), "int64"))

    def _stream(
        self, model: BoundLayer, part: Part, ids_BS: Any, tokens: TokenIndex, received: Mapping[str, Any]
    ) -> Any:
        """Return the residual stream after the blocks of a part."""
        blocks = [Node(getattr(model.blocks, str(index)), (STREAM,), STREAM) for index in part.blocks]
        stream = {STREAM: self._embedded(model, ids_BS, tokens) if part.begins else received[STREAM]}
        return run_graph(model, blocks, stream, (STREAM,), tokens)[STREAM]

    def _embedded(self, model: BoundLayer, ids_BS: Any, tokens: TokenIndex) -> Any:
        x_TH = model.tokens(ids_BS, tokens)
        for name in self.embeddings:
            x_TH = getattr(model, name)(x_TH, tokens)
        return x_TH

    def _logits(self, model: BoundLayer, x_TH: Any) -> Any:
        """Return logits [T, V] in the order of ``tokens.gathered``."""
        tied = (model.tokens.weight,) if self.config.tied else ()
        return run_alone(model.head(model.norm(x_TH)[1], *tied))
