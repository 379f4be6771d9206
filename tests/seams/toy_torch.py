"""The toy task. Shapes as in toy.py."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt4d.config import Config
from gpt4d.data.loader import Batch, Counts
from gpt4d.model.parts import Part
from gpt4d.parallel import random
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.stage import Stage
from gpt4d.task.task import Artifact

SAMPLES, HELD_OUT = 64, 16
DECAY = 0.8  # factor of the averaged weight at each step


def samples(config: Config, sample_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [B, S, F] and targets [B, S, O] of samples, float32: functions of the seed and their ids."""
    model, length = config.model, config.train.seq_len
    key = random.key(config.train.seed, "samples")
    shape = (SAMPLES + HELD_OUT, length, model.features)
    whole = (slice(0, length), slice(0, model.features))
    inputs = torch.cat([random.normal(key, shape, (slice(i, i + 1), *whole)) for i in sample_ids])
    return inputs, inputs[..., : model.outputs] - inputs[..., -model.outputs :].sin()


class HeldOut(NamedTuple):
    """Two batches of held-out samples (gpt4d.task.task.ValidationSet)."""

    task: "Regression"
    steps: int = 2

    @property
    def units(self) -> int:
        return self.steps * self.task.counts(0).trained

    def batches(self, index: int) -> Iterator[Batch]:
        return self.task._microbatches(index * self.task.config.train.batch_size, SAMPLES, HELD_OUT)

    def text_bytes(self) -> None: ...


class Regression:
    """Rows of numbers to be predicted from rows of numbers (gpt4d.task.task.Task). It averages one weight over time."""

    unit = "rows"
    samples = SAMPLES
    waited_s = 0.0

    def __init__(self, config: Config):
        self.config = config
        self.units_per_sample = config.train.seq_len

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        self._stage, self._micro_batch_size = stage, micro_batch_size
        self._averaged = stage.module.output.weight if hasattr(stage.module, "output") else None
        if self._averaged is not None:
            self._average = torch.zeros_like(self._averaged, requires_grad=False)

    def batches(self, first_sample: int) -> Iterator[Batch]:
        return self._microbatches(first_sample, 0, SAMPLES)

    def counts(self, first_sample: int) -> Counts:
        return Counts(*[self.config.train.batch_size * self.units_per_sample] * 2)

    def training_values(self, first_sample: int, stop: int) -> dict[str, Any]:
        return {}

    @property
    def validation(self) -> dict[str, "HeldOut"]:
        return {"held_out": HeldOut(self)}

    def _microbatches(self, first_sample: int, offset: int, count: int) -> Iterator[Batch]:
        grid, device, size = self._stage.grid, self._stage.weights.device, self._micro_batch_size
        for part in range(first_sample, first_sample + self.config.train.batch_size, size * grid.sizes.batch_shards):
            start = part + grid.batch_shard * size
            ids = torch.arange(start, start + size)
            inputs, targets = samples(self.config, (offset + ids % count).tolist())
            yield Batch({"rows": inputs.to(device)}, targets.to(device), ids.to(device))

    def compute(
        self, module: nn.Module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        model: Any = module
        return model.spec.compute(model, part, received, batch.inputs["rows"], batch.targets)

    def position(self, sample: int) -> dict[str, int]:
        return {}

    def seek(self, sample: int, position: Mapping[str, int]) -> None: ...

    def after_update(self, step: int) -> None:
        if self._averaged is None:
            return
        self._stage.weights.pre_gather_hook(self._averaged)
        self._average.lerp_(self._averaged.detach(), 1 - DECAY)

    def after_init(self) -> None:
        if self._averaged is not None:
            self._average.zero_()

    def sample(self) -> Artifact:
        inputs, targets = samples(self.config, [SAMPLES])
        with torch.no_grad():
            batch = Batch({"rows": inputs}, targets, torch.tensor([SAMPLES]))
            error = self.compute(self._stage.module, self._stage.parts[0], batch, {})["loss"]
        return Artifact(f"squared error of a held-out sample: {error:.4g}", {"squared_error": error.item()})

    def summary(self) -> str:
        return f"{SAMPLES} samples to train on, {HELD_OUT} held out"

    def identity(self) -> dict[str, str]:
        return {"samples": f"{SAMPLES} of {self.config.train.seq_len} rows", "data": "random rows"}

    def verify(self, run_dir: Path) -> None: ...

    def documents(self) -> dict[str, bytes]:
        return {}

    def extra_state(self) -> dict[str, tuple[torch.Tensor, ParameterSpec]]:
        return {} if self._averaged is None else {"output_average": (self._average, self._averaged.spec)}

    def close(self) -> None: ...
