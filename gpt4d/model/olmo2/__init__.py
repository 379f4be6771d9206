"""OLMo 2: RMSNorm behind each branch, norms of all queries and of all keys, rotary positions, SwiGLU. No torch here."""

from dataclasses import fields, replace

from gpt4d.config import Config
from gpt4d.model.family import Family
from gpt4d.model.llama import FAMILY as LLAMA
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.model.olmo2.model import describe


def _check(config: Config) -> None:
    assert isinstance(config.model, Olmo2Config)
    LLAMA.check(replace(config, model=config.model.llama))


FAMILY = Family(
    name="olmo2",
    config=Olmo2Config,
    structure=tuple(field.name for field in fields(Olmo2Config) if field.name not in ("name", "vocab_multiple")),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.olmo2.hugging_face",
    hf_model_types=("olmo2",),
)
