"""The record that describes a model family to the rest of gpt4d."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from gpt4d.config import Config, ModelConfig
from gpt4d.model.description import Description

if TYPE_CHECKING:  # families are described without torch; only building a model needs it
    import torch


class HuggingFaceAdapter(Protocol):
    """Converts a family's weights and settings to a model of transformers or diffusers, and back.

    Attributes:
        CLASS: name of the class whose ``from_pretrained`` loads an exported model.
        PIPELINE_TAG: the hub's name for the purpose of the models.
        USAGE: lines of Python that load and use an exported model.
        FOLDER: folder of the weights and their ``config.json`` in an exported directory; empty: the directory itself.
        FILE: name of the file of weights, without its suffix.
        BASE: prefix of the library's tensor names that files of a base model without a head omit; may be empty.
        BUFFERS: pattern of the names of tensors that the library stores in files but computes itself.
        HAS_TOKENIZER: whether a model comes with a tokenizer.
    """

    CLASS: str
    PIPELINE_TAG: str
    USAGE: str
    FOLDER: str
    FILE: str
    BASE: str
    BUFFERS: str
    HAS_TOKENIZER: bool

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of models that it reads: ``model_type`` of transformers, ``_class_name`` of diffusers."""

    def names(self, name: str, config: Any) -> list[str]:
        """Return the names of the library's tensors that gpt4d's parameter ``name`` corresponds to."""

    def copies(self, config: Any) -> dict[str, str]:
        """Return the names of tensors that files may contain as copies, each with the name of the original tensor."""

    def to_hf(self, name: str, tensor: "torch.Tensor", config: Any) -> "list[torch.Tensor]":
        """Return gpt4d's global tensor in the library's format: one tensor for each of ``names``."""

    def from_hf(
        self, name: str, tensors: "Sequence[torch.Tensor]", shape: tuple[int, ...], config: Any
    ) -> "torch.Tensor":
        """Return the library's tensors as gpt4d's global tensor of ``shape``: the inverse of ``to_hf``."""

    def documents(self, config: Any, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the JSON files of an exported model by path, such as ``config.json``.

        ``source``: the ``config.json`` of an imported model, whose settings remain; empty for other models.
        """

    def config_from_hf(self, source: str, values: dict) -> ModelConfig:
        """Return gpt4d's settings for the ``config.json`` of ``source``. Raises ConfigError for unsupported settings.

        For a pipeline of diffusers, ``values["scheduler"]`` is the content of ``scheduler_config.json``.
        """


@dataclass(frozen=True)
class Family:
    """One kind of model: its settings, its description and how it is built.

    Attributes:
        name: the family's name in the registry, in checkpoints and as Hydra's schema ``model=<name>``.
        config: the dataclass of its settings.
        positions: the part of ``structure`` that sets positions without weights. A run may start from the weights of a
            model with other values of them.
        task: the name of the task that such models are trained for.
        unit: the unit of progress: tokens, or images.
        check: raises ConfigError for settings that are impossible on any grid.
        describe: returns the torch-free description for given settings.
        adapter: the adapter to transformers or diffusers; None for a family without adapter.
    """

    name: str
    config: type[ModelConfig]
    task: str
    unit: str
    check: Callable[[Config], None]
    describe: Callable[[Any], Description]
    adapter: HuggingFaceAdapter | None = None
    positions: tuple[str, ...] = ()

    @cached_property
    def structure(self) -> tuple[str, ...]:
        """The settings that decide which parameters exist and how they are used. They must equal a checkpoint's."""
        keys = (each.name for each in fields(self.config) if not each.metadata.get("derived"))
        return tuple(key for key in keys if key not in self.config.unstructured)

    def hugging_face(self) -> HuggingFaceAdapter:
        """Return the adapter of a family that has one."""
        assert self.adapter, f"{self.name} has no adapter"
        return self.adapter

    def changed_structure(self, before: ModelConfig, after: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Return the settings in ``structure`` that differ between two models, by name, with both values."""
        values = {key: (getattr(before, key), getattr(after, key)) for key in self.structure}
        return {key: pair for key, pair in values.items() if pair[0] != pair[1]}

    def units_per_sample(self, config: Config) -> int:
        """Return the number of units in a sample of a run."""
        return config.train.seq_len if self.unit == "tokens" else 1
