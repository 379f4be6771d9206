"""The interface between the trainer and a task. No torch here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omegaconf import MISSING

from gpt4d.model.parts import Part
from gpt4d.parallel.layout import ParameterSpec

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from gpt4d.data.batch import Batch
    from gpt4d.parallel.stage import Stage


@dataclass
class GenerateConfig:
    """Settings of ``gpt4d.generate``; each task uses its own."""

    checkpoint: str = MISSING  # a checkpoint, or a run directory for its newest one
    gx: int = 1  # the grid of all processes, which need not equal the grid of the training
    gy: int = 1
    gz: int = 1
    prompt: str | None = None  # text to continue
    prompts: str | None = None  # or a file of texts to continue together, one a line
    tokens: int = 200  # maximum number of new tokens; the text ends earlier at an end-of-text token
    temperature: float = 0.8  # 0: greedy decoding
    top_k: int = 50  # only the k most likely tokens; 0: all
    out: str | None = None  # image file to write
    images: int = 64  # number of images in it, side by side
    steps: int = 50  # DDIM steps for each image
    seed: int = 0


class Artifact(NamedTuple):
    """A sample from a trained model: ``message`` for the console, ``values`` for metrics.jsonl."""

    message: str
    values: dict[str, Any]


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

    @property
    def validation_steps(self) -> int:
        """Number of held-out batches that a validation uses; 0 if there are none."""

    def validation_batches(self, index: int) -> Iterator["Batch"]:
        """Yield this rank's microbatches of one held-out batch."""

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

    def extra_state(self) -> Mapping[str, tuple["torch.Tensor", ParameterSpec]]:
        """Return further tensors to store with a checkpoint and to restore from it in place."""

    def close(self) -> None:
        """Stop reading data."""
