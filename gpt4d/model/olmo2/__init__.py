"""OLMo 2: RMSNorm behind each branch, norms of all queries and of all keys, rotary positions, SwiGLU. No torch here."""

from dataclasses import replace

from gpt4d.config import Config
from gpt4d.model.family import Family
from gpt4d.model.llama import FAMILY as LLAMA
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.model.olmo2.model import describe


def _check(config: Config) -> None:
    assert isinstance(config.model, Olmo2Config)
    LLAMA.check(replace(config, model=config.model.llama))


def _hugging_face():
    from gpt4d.model.olmo2 import hugging_face  # imports torch

    return hugging_face


FAMILY = Family(
    name="olmo2",
    config=Olmo2Config,
    structure=(
        "layers",
        "hidden",
        "heads",
        "key_value_heads",
        "head_size",
        "inner",
        "vocab_size",
        "max_positions",
        "norm_epsilon",
        "rope_theta",
    ),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    hugging_face=_hugging_face,
    hf_model_types=("olmo2",),
)
