"""OLMo 2: RMSNorm behind each branch, norms of all queries and of all keys, rotary positions, SwiGLU. No torch here."""

from gpt4d.config import Config
from gpt4d.model.family import Family
from gpt4d.model.llama import check_layers
from gpt4d.model.llama.config import ROPE_KEYS
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.model.olmo2.model import describe
from gpt4d.model.text_config import check_length, structure_of


def _check(config: Config) -> None:
    assert isinstance(config.model, Olmo2Config)
    check_layers(config.model.llama)
    check_length(config)


FAMILY = Family(
    name="olmo2",
    config=Olmo2Config,
    structure=structure_of(Olmo2Config),
    positions=("max_positions", *ROPE_KEYS),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.olmo2.hugging_face",
    hf_model_types=("olmo2",),
)
