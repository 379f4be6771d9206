"""Settings that all models of text have, and their check. No torch here."""

from typing import Protocol, cast

from gpt4d.config import Config, ConfigError


class TextConfig(Protocol):
    """Settings of every model of text. ``tied``: the head multiplies by the token embedding."""

    hidden: int
    vocab_size: int
    max_positions: int

    @property
    def tied(self) -> bool: ...

    @property
    def padded_vocab_size(self) -> int: ...


def check_length(config: Config) -> None:
    """Raise ConfigError if sequences are longer than the model's positions, or cannot be cut into the loss's parts."""
    length, most = config.train.seq_len, cast(TextConfig, config.model).max_positions
    if length > most:
        raise ConfigError(
            f"train.seq_len={length}: longer than model.max_positions={most}; "
            "lower train.seq_len or raise model.max_positions"
        )
    if length % config.train.loss_chunks:
        raise ConfigError(
            f"train.loss_chunks={config.train.loss_chunks}: does not divide train.seq_len={length}; use a power of two"
        )
