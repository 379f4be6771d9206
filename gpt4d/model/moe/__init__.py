"""Mixtures of experts with the attention of a Llama: OLMoE, Qwen3-MoE, Mixtral. No torch here."""

from gpt4d.config import Config, ConfigError
from gpt4d.model.family import Family
from gpt4d.model.llama import check_layers
from gpt4d.model.llama.config import ROPE_KEYS
from gpt4d.model.moe.config import TRAINED_WITH, MoeConfig
from gpt4d.model.moe.model import describe
from gpt4d.model.text_config import check_length, structure_of

_ADAPTED = "qkv", "output"  # layers that can have adapters


def _check(config: Config) -> None:
    model = config.model
    assert isinstance(model, MoeConfig)
    check_layers(model.llama)
    if model.experts_per_token > model.experts:
        raise ConfigError(
            f"model.experts_per_token={model.experts_per_token}: more than model.experts={model.experts}; lower it"
        )
    _check_adapters(model)
    check_length(config)


def _check_adapters(model: MoeConfig) -> None:
    """Raise ConfigError if experts are to have adapters (``lora.targets``)."""
    if model.lora is None or set(model.lora.targets) <= set(_ADAPTED):
        return
    raise ConfigError(
        f"lora.targets=[{','.join(model.lora.targets)}]: adapters of experts are not supported; set "
        f"lora.targets=[{','.join(_ADAPTED)}], which are layers of attention"
    )


FAMILY = Family(
    name="moe",
    config=MoeConfig,
    structure=tuple(key for key in structure_of(MoeConfig) if key not in TRAINED_WITH),
    positions=("max_positions", *ROPE_KEYS),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.moe.hugging_face",
    hf_model_types=("olmoe", "qwen3_moe", "mixtral"),
)
