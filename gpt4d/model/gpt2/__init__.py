"""GPT-2: pre-LayerNorm, learned positions, GELU, biases, the head tied to the token embedding. No torch here."""

from gpt4d.config import LARGEST_COUNT, LARGEST_SIZE, Config, ConfigError, check_at_least, check_fraction, divisors
from gpt4d.model.family import Family
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.gpt2.model import describe
from gpt4d.model.text_config import check_length


def _check(config: Config) -> None:
    model = config.model
    assert isinstance(model, GPT2Config)
    check_at_least("model.layers", model.layers, 1, LARGEST_COUNT)
    for key in ("hidden", "heads", "vocab_size", "vocab_multiple", "max_positions"):
        check_at_least(f"model.{key}", getattr(model, key), 1, LARGEST_SIZE)
    check_at_least("model.norm_epsilon", model.norm_epsilon, 0, 1)
    for key in ("dropout", "attention_dropout"):
        check_fraction(f"model.{key}", getattr(model, key))
    if model.hidden % model.heads:
        choices = ", ".join(map(str, divisors(model.hidden)))
        raise ConfigError(
            f"model.heads={model.heads}: does not divide model.hidden={model.hidden}; use one of {choices}"
        )
    check_length(config)


def _hugging_face():
    from gpt4d.model.gpt2 import hugging_face  # imports torch

    return hugging_face


FAMILY = Family(
    name="gpt2",
    config=GPT2Config,
    structure=("layers", "hidden", "heads", "vocab_size", "max_positions", "norm_epsilon"),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    hugging_face=_hugging_face,
    hf_model_types=("gpt2",),
)
