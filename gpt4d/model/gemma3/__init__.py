"""Gemma 3 text models: norms on both sides of each branch, GeGLU, local and global attention. No torch here."""

from gpt4d.config import Config
from gpt4d.model.family import Family
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gemma3.model import describe
from gpt4d.model.llama import check_layers
from gpt4d.model.text_config import check_length, structure_of


def _check(config: Config) -> None:
    assert isinstance(config.model, Gemma3Config)
    check_layers(config.model.llama)
    check_length(config)


FAMILY = Family(
    name="gemma3",
    config=Gemma3Config,
    structure=structure_of(Gemma3Config),
    positions=("max_positions", "rope_theta", "rope_linear_factor", "rope_local_theta"),
    task="language_modeling",
    unit="tokens",
    check=_check,
    describe=describe,
    adapter="gpt4d.model.gemma3.hugging_face",
    hf_model_types=("gemma3_text",),
)
