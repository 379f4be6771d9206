"""Settings of all text models, and their check. No torch here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

from gpt4d.config import COUNT, SIZE, Config, ConfigError, Effect, GridSizes, ModelConfig, divisors, setting
from gpt4d.config.conditions import with_base
from gpt4d.parallel.layers.embedding import TokenEmbeddingSpec
from gpt4d.parallel.layers.linear import LinearSpec


class TextConfig(Protocol):
    """Settings of every text model. ``tied``: the head multiplies by the token embedding."""

    hidden: int
    vocab_size: int | None
    max_positions: int

    @property
    def tied(self) -> bool: ...

    @property
    def padded_vocab_size(self) -> int: ...

    def extension(self, length: int) -> list[str]: ...


def head(config: TextConfig) -> LinearSpec:
    """Return the spec of the layer from hidden features to logits, unless it is tied to the token embedding."""
    return LinearSpec(
        config.hidden, config.padded_vocab_size, bias=False, used=config.vocab_size, float8=False, group="head"
    )


def token_embedding(config: TextConfig) -> TokenEmbeddingSpec:
    """Return the spec of the token embedding."""
    return TokenEmbeddingSpec(config.padded_vocab_size, config.hidden, used=config.vocab_size)


class PaddedVocabulary:
    """The padding of a vocabulary, which the embedding and the head split over x and z.

    Checkpoints do not contain it, because it depends on the grids, and the loss excludes it.
    """

    vocab_size: int | None
    vocab_multiple: int

    @property
    def padded_vocab_size(self) -> int:
        assert self.vocab_size, "gpt4d.data.completion has not completed the settings"
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def on_grids(self, grids: Iterable[GridSizes]) -> Any:
        """Return the settings with a ``vocab_multiple`` that each of ``grids`` divides."""
        settings: Any = self
        return replace(settings, vocab_multiple=math.lcm(self.vocab_multiple, *(sizes.x * sizes.z for sizes in grids)))


@dataclass
class TransformerConfig(PaddedVocabulary, ModelConfig):
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
        128, "a divisor of the padded vocabulary, as is each stage's gx·gz", **SIZE, effect=Effect.ROUNDING
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

    def extension(self, length: int) -> list[str]:
        """Return the overrides that extend a trained model to ``length`` tokens; empty if its positions are learned."""
        return []


def structure_of(settings: type[TransformerConfig]) -> tuple[str, ...]:
    """Return all settings of a family that decide which parameters exist and how they are used."""
    keys = [field.name for field in fields(settings) if not field.metadata.get("derived")]
    return tuple(key for key in keys if key not in ("name", "vocab_multiple", "base_hidden"))


def check_length(config: Config) -> None:
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
