"""GPT-2: pre-LayerNorm, learned positions, GELU, biases, the head tied to the token embedding. No torch here."""

from gpt4d.config import Config, ConfigError, divisors
from gpt4d.model.family import Family
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.gpt2.model import describe
from gpt4d.model.text_config import check_length


def _check(config: Config) -> None:
    model = config.model
    assert isinstance(model, GPT2Config)
    if model.hidden % model.heads:
        choices = ", ".join(map(str, divisors(model.hidden)))
        raise ConfigError(
            f"model.heads={model.heads}: does not divide model.hidden={model.hidden}; use one of {choices}"
        )
    if model.attention_dropout and config.parallel.context_exchange == "ring":
        raise ConfigError(
            f"parallel.context_exchange=ring: model.attention_dropout={model.attention_dropout} needs the keys of "
            "complete sequences; use parallel.context_exchange=all_gather, or model.attention_dropout=0"
        )
    check_length(config)


FAMILY = Family(
    name="gpt2",
    config=GPT2Config,
    structure=("layers", "hidden", "heads", "vocab_size", "max_positions", "norm_epsilon"),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.gpt2.hugging_face",
    hf_model_types=("gpt2",),
)
