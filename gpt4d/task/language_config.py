"""Checks of the settings of language modeling. No torch here."""

from typing import Any

from gpt4d.config import Config, ConfigError, blend_stages
from gpt4d.data.checks import check_data
from gpt4d.data.completion import tokenizer_size


def check(config: Config) -> None:
    """Raise ConfigError unless the data can be read and its tokens fit the model."""
    model: Any = config.model  # of any family; all language models have a vocab_size
    check_data(config.data, model.name)
    if config.data.stream and config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs}: data.stream=true does not know the length of an epoch; set "
            "train.steps or train.tokens"
        )
    if config.data.source == "blend" and len(blend_stages(config.data.blend)) > 1 and config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs}: the stages of data.blend begin at fractions of a run, whose length "
            "must be known; set train.steps or train.tokens"
        )
    size = tokenizer_size(config.data, download=False)
    if size and size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the tokenizer of data={config.data.name} has {size} tokens, and the "
            f"model needs a row for each; set model.vocab_size={size} or more, or use another tokenizer"
        )
    vocabulary = config.data.tokenizer_vocab
    if vocabulary is not None and vocabulary > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer_vocab={vocabulary}: more than model.vocab_size={model.vocab_size}; "
            "the model needs a row for every token, so lower data.tokenizer_vocab or raise model.vocab_size"
        )
