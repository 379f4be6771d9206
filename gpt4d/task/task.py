"""The interface between the trainer and a task. No torch here."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omegaconf import MISSING

from gpt4d.config import GridSizes, setting
from gpt4d.model.parts import Part
from gpt4d.parallel.layout import ParameterSpec

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from gpt4d.data.loader import Batch, Counts
    from gpt4d.parallel.stage import Stage


@dataclass
class InferenceConfig:
    """Settings of all commands that use a trained model.

    Their plan uses all processes. It need not equal the plan of the training.
    """

    checkpoint: str = setting(MISSING, "a checkpoint, or a run directory for its newest one")
    gx: int = setting(1, "devices along x", at_least=1)
    gy: int = setting(1, "devices along y", at_least=1)
    gz: int = setting(1, "devices along z", at_least=1)
    gdata: int = setting(1, "data parallelism", at_least=1)
    stages: int = setting(1, "pipeline stages, each on a grid of these sizes", at_least=1)

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(self.gx, self.gy, self.gz, self.gdata)


@dataclass
class Sampling:
    """How the next token is drawn. Text i is drawn with the seed ``seed + i``, independently of all other texts."""

    temperature: float = setting(0.8, "divides the logits; 0: greedy decoding", at_least=0)
    top_k: int = setting(50, "draw among the k most likely tokens; 0: all", at_least=0)
    top_p: float = setting(1.0, "draw among the most likely tokens of this total probability", above=0, at_most=1)
    min_p: float = setting(0.0, "least probability of a token, relative to the largest one", at_least=0, at_most=1)
    repetition_penalty: float = setting(1.0, "divides positive logits of tokens in the text; 1: no penalty", above=0)
    seed: int = setting(0, "seed of the first text")


@dataclass
class GenerateConfig(Sampling, InferenceConfig):
    """Settings of ``gpt4d generate``; each task uses its own."""

    prompt: str | None = setting(None, "text to continue")
    prompts: str | None = setting(None, "or a file of texts to continue together, one a line")
    tokens: int = setting(
        200, "maximum number of new tokens; the text ends earlier at an end-of-text token", at_least=0
    )
    out: str | None = setting(None, "image file to write")
    images: int = setting(64, "number of images in it, side by side", at_least=1)
    steps: int = setting(50, "DDIM steps for each image", at_least=1)


class Artifact(NamedTuple):
    """A sample from a trained model: ``message`` for the console, ``values`` for metrics.jsonl."""

    message: str
    values: dict[str, Any]


class ValidationSet(Protocol):
    """Samples that every evaluation of the model uses. All ranks call the same methods together.

    Attributes:
        steps: number of global batches.
        units: global number of units of these batches that have a loss.
    """

    @property
    def steps(self) -> int: ...

    @property
    def units(self) -> int: ...

    def batches(self, index: int) -> Iterator["Batch"]:
        """Yield this rank's microbatches of one global batch."""

    def text_bytes(self) -> int | None:
        """Return the number of UTF-8 bytes of the text that the units encode; None if the units encode no text."""


class Task(Protocol):
    """The data and the loss that a model is trained with. All ranks call the same methods in the same order.

    Attributes:
        unit: the unit of progress: tokens or images.
        units_per_sample: number of units in a sample.
        samples: number of samples in an epoch.
        waited_s: seconds that steps waited for data; the caller may set it to 0.
    """

    unit: str
    units_per_sample: int
    samples: int
    waited_s: float

    def connect(self, stage: "Stage", micro_batch_size: int) -> None:
        """Prepare to read this rank's part of each batch for a stage."""

    def batches(self, first_sample: int) -> Iterator["Batch"]:
        """Yield this rank's microbatches of the global batch that begins with sample ``first_sample``."""

    def counts(self, first_sample: int) -> "Counts":
        """Return the global numbers of units of the global batch that begins with sample ``first_sample``.

        The number of ``trained`` units divides the loss, and the number of ``unpadded`` units the losses of routers.
        """

    @property
    def validation(self) -> Mapping[str, ValidationSet]:
        """The validation sets by name, available after ``connect``. The set ``held_out`` is the first one."""

    def training_values(self, first_sample: int, stop: int) -> dict[str, Any]:
        """Return additional values for the line of a logged step in metrics.jsonl, by key.

        The steps since the last call have trained on the samples from ``first_sample`` up to ``stop``.
        """

    def compute(
        self, module: "nn.Module", part: Part, batch: "Batch", received: "Mapping[str, torch.Tensor]"
    ) -> "Mapping[str, torch.Tensor]":
        """Return the tensors that a part of the model produces for later parts, by name.

        The last part returns ``loss``, summed, not averaged, over this rank's units of a microbatch: a scalar.
        ``received`` contains the tensors that earlier parts have produced for this one.
        """

    def verify(self, run_dir: "Path") -> None:
        """Verify the files that the run reads, before its first step. Raises ConfigError on every rank.

        ``run_dir`` may contain a record of files that were verified earlier.
        """

    def after_update(self, step: int) -> None:
        """Update the task's own state after an optimizer step.

        Rows of a weight that other ranks updated (``optim.shard_states``) may still be on their way; call
        ``stage.weights.pre_gather_hook(parameter)`` before reading one. They are rounded to the compute dtype. Only
        own rows are exact (``gpt4d.parallel.gradient_reducer.own_rows``).
        """

    def after_init(self) -> None:
        """Reset the task's own state after weights were loaded without it."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the stage has the averages of its weights, if the run has averages.

        All ranks enter it together.
        """

    def sample(self) -> Artifact | None:
        """Produce a sample with the trained model; None if the settings ask for no sample."""

    def summary(self) -> str:
        """Return a readable description of the training data."""

    def identity(self) -> dict[str, str]:
        """Return fingerprints of the data's meaning, compared when a run resumes, and ``data``, the data's name.

        ``samples`` is the fingerprint of the samples without the settings that decide their order.
        """

    def documents(self) -> dict[str, bytes]:
        """Return files to store with a checkpoint, by name."""

    def position(self, sample: int) -> dict[str, int]:
        """Return a position in the data from which ``sample`` can be read; empty if its index is sufficient."""

    def seek(self, sample: int, position: Mapping[str, int]) -> None:
        """Continue the training data with ``sample``, before the first batch.

        ``position``: a result of ``position`` for this sample and equal data; empty for other data.
        """

    def extra_state(self) -> Mapping[str, tuple["torch.Tensor", ParameterSpec]]:
        """Return additional tensors to store with a checkpoint and to restore in place; each on one stage only."""

    def close(self) -> None:
        """Stop reading data."""
