"""The base class of tasks that read samples from files: loaders, held-out batches, averaged weights."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from gpt4d.config import Config
from gpt4d.data.batch import Batch
from gpt4d.data.loader import Loader, Source
from gpt4d.model import registry
from gpt4d.parallel.stage import Stage
from gpt4d.task.averages import WeightAverages


class ReadingTask(ABC):
    """Part of a task (gpt4d.task.task.Task) that reads ``training`` samples and, if given, ``held_out`` samples."""

    config: Config

    def __init__(self, config: Config, training: Source, held_out: Source | None):
        self.config, self._training, self._held_out = config, training, held_out
        family = registry.of(config.model)
        self.unit, self.units_per_sample = family.unit, family.units_per_sample(config)
        self.samples = training.count

    @abstractmethod
    def _reads(self, stage: Stage) -> bool:
        """Return whether a stage needs the contents of the samples."""

    @abstractmethod
    def _batch(self, rows: torch.Tensor, sample_ids: torch.Tensor, held_out: bool = False) -> Batch:
        """Return the batch of a microbatch's rows, as gpt4d.data.loader.Loader yields them."""

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        self._stage, train, grid = stage, self.config.train, stage.grid
        shard = train.batch_size, grid.batch_shard, grid.sizes.batch_shards, micro_batch_size, stage.weights.device
        self._reading = self._reads(stage)
        self._loader = Loader(self._training, *shard, self.config.data.workers, self._reading)
        self._validation = Loader(self._held_out, *shard, workers=0, reads=self._reading) if self._held_out else None
        self._averages = WeightAverages(stage, self.config.optim.ema_decay, self.config.optim.shard_states)

    @property
    def waited_s(self) -> float:
        return self._loader.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._loader.waited_s = seconds

    def batches(self, first_sample: int) -> Iterator[Batch]:
        return itertools.starmap(self._batch, self._loader.step(first_sample))

    @property
    def validation_steps(self) -> int:
        complete = self._held_out.count // self.config.train.batch_size if self._held_out else 0
        return min(self.config.train.validation_batches, complete)

    def validation_batches(self, index: int) -> Iterator[Batch]:
        assert self._validation is not None
        rows = self._validation.step(index * self.config.train.batch_size)
        return itertools.starmap(partial(self._batch, held_out=True), rows)

    def after_update(self, step: int) -> None:
        self._averages.update(step)

    def after_init(self) -> None:
        self._averages.reset()

    def extra_state(self) -> Mapping:
        return self._averages.state()

    def close(self) -> None:
        self._loader.close()
