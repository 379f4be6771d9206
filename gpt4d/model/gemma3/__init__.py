"""Gemma 3 of text: norms on both sides of each branch, GeGLU, local and global attention. No torch here."""

from dataclasses import fields, replace

from gpt4d.config import LARGEST_COUNT, LARGEST_SIZE, Config, ConfigError, check_at_least, check_at_most
from gpt4d.model.family import Family
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gemma3.model import describe
from gpt4d.model.llama import FAMILY as LLAMA


def _check(config: Config) -> None:
    model = config.model
    assert isinstance(model, Gemma3Config)
    LLAMA.check(replace(config, model=model.llama))
    for key in ("window", "query_pre_attn_scalar"):
        check_at_least(f"model.{key}", getattr(model, key), 1, LARGEST_SIZE)
    check_at_least("model.global_every", model.global_every, 1, LARGEST_COUNT)
    check_at_least("model.rope_linear_factor", model.rope_linear_factor, 1, LARGEST_SIZE)
    if not model.rope_local_theta > 1:
        raise ConfigError(f"model.rope_local_theta={model.rope_local_theta}: use a number above 1, such as 10000")
    check_at_most("model.rope_local_theta", model.rope_local_theta)


def _hugging_face():
    from gpt4d.model.gemma3 import hugging_face  # imports torch

    return hugging_face


FAMILY = Family(
    name="gemma3",
    config=Gemma3Config,
    structure=tuple(field.name for field in fields(Gemma3Config) if field.name not in ("name", "vocab_multiple")),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    hugging_face=_hugging_face,
    hf_model_types=("gemma3_text",),
)
