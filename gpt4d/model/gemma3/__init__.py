"""Gemma 3 text models: norms on both sides of each branch, GeGLU, local and global attention. No torch here."""

from dataclasses import fields, replace

from gpt4d.config import Config
from gpt4d.model.family import Family
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gemma3.model import describe
from gpt4d.model.llama import FAMILY as LLAMA


def _check(config: Config) -> None:
    assert isinstance(config.model, Gemma3Config)
    LLAMA.check(replace(config, model=config.model.llama))


FAMILY = Family(
    name="gemma3",
    config=Gemma3Config,
    structure=tuple(field.name for field in fields(Gemma3Config) if field.name not in ("name", "vocab_multiple")),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.gemma3.hugging_face",
    hf_model_types=("gemma3_text",),
)
