"""Llama, Qwen2 and Qwen3: RMSNorm, rotary positions, SwiGLU, grouped-query attention. No torch here."""

from gpt4d.config import Config, ConfigError, divisors
from gpt4d.model.family import Family
from gpt4d.model.llama.config import ROPE_KEYS, LlamaConfig
from gpt4d.model.llama.model import describe
from gpt4d.model.text_config import check_length, structure_of


def _check(config: Config) -> None:
    assert isinstance(config.model, LlamaConfig)
    check_layers(config.model)
    check_length(config)


def check_layers(model: LlamaConfig) -> None:
    """Raise ConfigError for layers that are impossible on any grid."""
    if model.heads % model.key_value_heads:
        choices = ", ".join(map(str, divisors(model.heads)))
        raise ConfigError(
            f"model.key_value_heads={model.key_value_heads}: does not divide model.heads={model.heads}; use one of "
            f"{choices}"
        )
    if model.head_size % 2:
        raise ConfigError(
            f"model.head_size={model.head_size}: odd; use an even number, since rotary positions turn pairs of features"
        )
    if model.rope_scaling in ("llama3", "yarn"):
        _check_rope(model)


def _check_rope(model: LlamaConfig) -> None:
    if model.rope_original_positions < 1:
        raise ConfigError(
            f"model.rope_original_positions={model.rope_original_positions}: set it to the longest sequence of the "
            "training without model.rope_scaling"
        )
    low, high = ("low_frequency", "high_frequency") if model.rope_scaling == "llama3" else ("beta_slow", "beta_fast")
    slow, fast = getattr(model, f"rope_{low}"), getattr(model, f"rope_{high}")
    if not slow < fast:
        raise ConfigError(f"model.rope_{low}={slow}: use a value below model.rope_{high}={fast}")


FAMILY = Family(
    name="llama",
    config=LlamaConfig,
    structure=structure_of(LlamaConfig),
    positions=("max_positions", *ROPE_KEYS),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.llama.hugging_face",
    hf_model_types=("llama", "qwen2", "qwen3"),
)
