"""The record that describes a model family to the rest of gpt4d."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpt4d.config import Config, ModelConfig
from gpt4d.model.description import Description, Part

if TYPE_CHECKING:  # families are described without torch; only building a model needs it
    import torch
    from torch import nn

    from gpt4d.parallel.weights import WeightStream


class HuggingFaceAdapter(Protocol):
    """Converts a family's weights and settings to those of a transformers model and back."""

    def name(self, name: str) -> str:
        """Return the name that transformers gives our parameter ``name``."""

    def to_hf(self, name: str, tensor: "torch.Tensor", config: Any) -> "torch.Tensor":
        """Return our global tensor in the shape that transformers uses."""

    def from_hf(self, name: str, tensor: "torch.Tensor", shape: tuple[int, ...]) -> "torch.Tensor":
        """Return a transformers tensor as our global tensor of ``shape``: the inverse of ``to_hf``."""

    def hf_config(self, config: Any, end_of_text: int | None = None) -> Any:
        """Return the transformers configuration of such a model."""

    def config_from_hf(self, source: str, values: dict) -> ModelConfig:
        """Return our settings for the ``config.json`` of ``source``. Raises ConfigError for unsupported settings."""


@dataclass(frozen=True)
class Family:
    """One kind of model: its settings, its description and how it is built.

    Attributes:
        name: the family's name in the registry, in checkpoints and as Hydra's schema ``model=<name>``.
        config: the dataclass of its settings.
        structure: the settings that decide which parameters exist and what they compute; they must agree with a
            checkpoint's.
        task: the name of the task that such models are trained for.
        check: raises ConfigError for settings that are impossible on any grid.
        describe: returns the torch-free description for given settings.
        build: returns parts of the model, whose parameters a weight stream creates, their values unset. It imports
            torch.
        hugging_face: returns the adapter to transformers, if there is one. It may import transformers.
        hf_model_types: ``model_type`` of the transformers models that the adapter reads.
    """

    name: str
    config: type[ModelConfig]
    structure: tuple[str, ...]
    task: str
    check: Callable[[Config], None]
    describe: Callable[[Any], Description]
    build: Callable[[Any, "WeightStream", Sequence[Part]], "nn.Module"]
    hugging_face: Callable[[], HuggingFaceAdapter] | None = None
    hf_model_types: tuple[str, ...] = ()
