"""Text models: their settings, and their base: token ids → blocks → logits or the loss, in one part or several.

Shapes: B sequences, S positions, T tokens, H hidden, V vocabulary. No torch here.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from gpt4d.config import COUNT, SIZE, Config, ConfigError, Effect, GridSizes, ModelConfig, divisors, setting
from gpt4d.config.conditions import with_base
from gpt4d.model.description import Description
from gpt4d.model.family import Family, HuggingFaceAdapter
from gpt4d.model.parts import STREAM, ModelSpec, Part
from gpt4d.parallel.engine.interleave import Node, join, run_alone, run_graph
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.embedding import TokenEmbeddingSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec, TiedHeadSpec
from gpt4d.parallel.layers.loss import cross_entropy_sum, head_loss
from gpt4d.parallel.layers.product import Recomputable
from gpt4d.parallel.layers.sequence import Documents, KeyValueCache, tokens_of


class TextConfig(ModelConfig):
    """Settings of every text model, which a subclass has as fields.

    Checkpoints do not contain the padding of the vocabulary, because it depends on the grids, and the loss excludes it.

    Attributes:
        tied: the head multiplies by the token embedding.
    """

    hidden: int
    vocab_size: int | None
    vocab_multiple: int
    max_positions: int
    tied = False
    unstructured = ModelConfig.unstructured | {"vocab_multiple", "base_hidden"}

    @property
    def padded_vocab_size(self) -> int:
        assert self.vocab_size, "gpt4d.data.completion has not completed the settings"
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def on_grids(self, grids: Iterable[GridSizes]) -> Any:
        """Return the settings with a ``vocab_multiple`` that each of ``grids`` divides."""
        settings: Any = self
        return replace(settings, vocab_multiple=math.lcm(self.vocab_multiple, *(sizes.x * sizes.z for sizes in grids)))

    def extension(self, length: int) -> list[str]:
        """Return the overrides that extend a trained model to ``length`` tokens; empty if its positions are learned."""
        return []


def head(config: TextConfig) -> LinearSpec:
    """Return the spec of the layer from hidden features to logits, unless it is tied to the token embedding."""
    return LinearSpec(config.hidden, config.padded_vocab_size, bias=False, used=config.vocab_size, group="head")


def token_embedding(config: TextConfig) -> TokenEmbeddingSpec:
    """Return the spec of the token embedding."""
    return TokenEmbeddingSpec(config.padded_vocab_size, config.hidden, used=config.vocab_size)


@dataclass
class TransformerConfig(TextConfig):
    """Settings of all text transformers."""

    layers: int = setting(4, "number of blocks", **COUNT, aliases="n_layer n_layers num_layers num_hidden_layers")
    hidden: int = setting(
        128, "features of the residual stream", **SIZE, aliases="n_embd hidden_size d_model dim embed_dim"
    )
    heads: int = setting(
        4, "attention heads of a block", **SIZE, aliases="n_head n_heads num_heads num_attention_heads"
    )
    vocab_size: int | None = setting(None, "number of token ids; null: the size of the tokenizer", **SIZE)
    vocab_multiple: int = setting(
        128, "a divisor of the padded vocabulary, as is x·z of each stage", **SIZE, effect=Effect.ROUNDING
    )
    max_positions: int = setting(256, "maximum length of a sequence", **SIZE)
    norm_epsilon: float = setting(1e-5, "addend of the variance in norms", at_least=0, at_most=1)
    base_hidden: int | None = setting(
        None,
        "optim.width_transfer: hidden features of the model that the learning rate fits",
        **SIZE,
        read_if=with_base,
    )
    width_key = "hidden"

    @property
    def branch_std(self) -> float:
        """Initial standard deviation of the last layer of each branch: 2·layers outputs are added (GPT-2)."""
        return 0.02 / (2 * self.layers) ** 0.5


def positions_of(settings: type[ModelConfig]) -> tuple[str, ...]:
    """Return the settings of a family that set rotary positions; none for a family without them."""
    rotary = [each.name for each in fields(settings) if each.name.startswith("rope_")]
    return ("max_positions", *rotary) if rotary else ()


def text_family(
    name: str,
    settings: type[TextConfig],
    describe: Callable[[Any], Description],
    adapter: HuggingFaceAdapter | None = None,
    check: Callable[[Config], None] = lambda config: None,
) -> Family:
    """Return a family of text models. ``check`` need not check lengths. See ``Family`` for the arguments."""

    def check_all(config: Config) -> None:
        check(config)
        _check_length(config)

    positions = positions_of(settings)
    return Family(name, settings, "language_modeling", "tokens", check_all, describe, adapter, positions)


def _check_length(config: Config) -> None:
    """Raise ConfigError if ``train.seq_len`` exceeds ``model.max_positions`` or is not divisible by the loss chunks."""
    model, length = cast(TextConfig, config.model), config.train.seq_len
    if length > model.max_positions:
        problem = f"train.seq_len={length}: longer than model.max_positions={model.max_positions}"
        own = f"model.max_positions={length}"
        if settings := model.extension(length):
            raise ConfigError(
                f"{problem}; lower it, extend a trained model by RoPE scaling with {' '.join(settings)}, or train a "
                f"new model with {own}"
            )
        raise ConfigError(
            f"{problem}, and learned positions cannot be extended; lower it, or train a new model with {own}"
        )
    if length % config.train.loss_chunks:
        raise ConfigError(
            f"train.loss_chunks={config.train.loss_chunks}: does not divide train.seq_len={length}; "
            f"use one of {', '.join(map(str, divisors(length)))}"
        )


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
        ids_BS: Tensor,
        sample_ids_B: Tensor,
        documents: Documents | None = None,
        part: Part | None = None,
        received: Mapping[str, Tensor] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
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
        part = part or self.parts[0]
        produced = self.compute(model, part, received or {}, ids_BS, None, sample_ids_B, documents, cache=cache)
        return produced["logits" if part.ends else STREAM]

    def compute(
        self,
        model: BoundLayer,
        part: Part,
        received: Mapping[str, Tensor],
        ids_BS: Tensor,
        targets_BS: Tensor | None,
        sample_ids_B: Tensor,
        documents: Documents | None = None,
        masked: bool = False,
        with_token_losses: bool = False,
        cache: KeyValueCache | None = None,
    ) -> dict[str, Any]:
        """Return the residual stream [T, H] after a part as ``stream``; from the last part ``loss`` or ``logits``.

        The loss is the cross-entropy, summed, not averaged, over this rank's tokens with a target. Its gradient
        includes the z-loss (``train.z_loss``).
        ``with_token_losses`` adds the loss of each token as ``token_losses`` [B, S], without a gradient.
        With ``parallel.context``, S are the positions of this rank's segments of each sequence.

        Args:
            model: the layer of this spec.
            part: one of ``parts``.
            received: the residual stream after the part before, as ``stream``; nothing for the first part.
            ids_BS: as for ``forward``.
            targets_BS: ids of the tokens to predict. None: the last part returns the logits, as ``forward`` does.
            sample_ids_B: as for ``forward``.
            documents: as for ``forward``, of complete sequences.
            masked: tokens with a negative target have no target.
            with_token_losses: also return the losses of the tokens.
            cache: as for ``forward``.
        """
        complete = targets_BS is None and (cache is None or cache.complete)
        tokens = tokens_of(model, sample_ids_B, ids_BS.shape[1], documents, cache, complete)
        if part.begins:
            x_TH = model.tokens(ids_BS, tokens)
            for name in self.embeddings:
                x_TH = getattr(model, name)(x_TH, tokens)
            received = {STREAM: x_TH}
        blocks = [Node(getattr(model.blocks, str(index)), (STREAM,), STREAM) for index in part.blocks]
        x_TH = run_graph(model, blocks, received, (STREAM,), tokens)[STREAM]
        del received
        if not part.ends:
            return {STREAM: x_TH}
        targets_T = None if targets_BS is None else tokens.gathered(targets_BS)
        chunks = 1 if targets_T is None else model.context.loss_chunks
        if chunks == 1:
            tied = (model.tokens.weight,) if self.config.tied else ()
            logits = run_alone(model.head(model.norm(x_TH)[1], *tied))
            del x_TH
        if targets_T is None:
            return {"logits": tokens.restored(logits)}
        vocabulary, losses = self.config.vocab_size, list[Tensor]() if with_token_losses else None
        if chunks == 1:
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

    def planned_batch(self, tensor: Callable[..., Tensor], samples: int, length: int) -> tuple[Tensor, ...]:
        return (*(tensor((samples, length), "int64") for _ in range(2)), tensor((samples,), "int64"))
