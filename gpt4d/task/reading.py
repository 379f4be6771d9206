"""The base class of tasks that read samples from files: loaders, validation sets, averaged weights."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from gpt4d.config import HELD_OUT, Config, batch_size_at
from gpt4d.data import remote_files
from gpt4d.data.loader import Batch, Counts, Loader, Source
from gpt4d.model import registry
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.task.averages import WeightAverages


class ReadingTask(ABC):
    """Part of a task (gpt4d.task.task.Task) that reads samples from files.

    Args:
        config: the settings of the run.
        training: the training samples.
        held_out: the samples of the validation set ``held_out``; None: there is no such set.
        sets: the samples of additional validation sets, by name.
    """

    config: Config

    def __init__(
        self, config: Config, training: Source, held_out: Source | None, sets: Mapping[str, Source] | None = None
    ):
        self.config, self._training = config, training
        self._sets = {**({HELD_OUT: held_out} if held_out else {}), **(sets or {})}
        family = registry.of(config.model)
        self.unit, self.units_per_sample = family.unit, family.units_per_sample(config)
        self.samples = training.count

    @abstractmethod
    def _reads(self, stage: Stage, source: Source) -> bool:
        """Return whether a stage needs the contents of the samples of ``source``."""

    @abstractmethod
    def _batch(self, rows: torch.Tensor, sample_ids: torch.Tensor, held_out: bool = False) -> Batch:
        """Return the batch of a microbatch's rows, as gpt4d.data.loader.Loader yields them."""

    def _counts(self, source: Source, sample_ids: np.ndarray) -> Counts:
        """Return the numbers of units of the samples."""
        return Counts(*[len(sample_ids) * self.units_per_sample] * 2)

    def _text_bytes(self, source: Source, sample_ids: np.ndarray) -> int | None:
        """Return the number of UTF-8 bytes of the text of the units that have a loss; None if there is no text."""
        return None

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        self._stage, self._micro_batch_size = stage, micro_batch_size
        batch_size = self.config.train.batch_size
        self._loader = self._load(self._training, batch_size, self.config.data.workers)
        self.validation = {
            name: ReadSet(self, source, self._load(source, batch_size)) for name, source in self._sets.items()
        }
        self._averages = WeightAverages(stage, self.config.optim.ema_decay, self.config.optim.shard_states)

    def _load(self, source: Source, batch_size: int, workers: int = 0) -> Loader:
        grid, reads = self._stage.grid, self._reads(self._stage, source)
        shards = grid.sample_shards
        micro_batch_size = min(self._micro_batch_size, batch_size // shards)
        device = self._stage.weights.device
        return Loader(source, batch_size, grid.sample_shard, shards, micro_batch_size, device, workers, reads)

    @property
    def _validates_held_out(self) -> bool:
        """Whether at least one batch is held out."""
        return HELD_OUT in self.validation and self.validation[HELD_OUT].steps > 0

    @property
    def waited_s(self) -> float:
        return self._loader.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._loader.waited_s = seconds

    def batches(self, first_sample: int) -> Iterator[Batch]:
        batch_size = batch_size_at(self.config.train, first_sample)
        if batch_size != self._loader.batch_size:
            self._loader.close()
            waited_s = self.waited_s
            self._loader = self._load(self._training, batch_size, self.config.data.workers)
            self.waited_s = waited_s
        return itertools.starmap(self._batch, self._loader.step(first_sample))

    def counts(self, first_sample: int) -> Counts:
        batch_size = batch_size_at(self.config.train, first_sample)
        return self._counts(self._training, np.arange(first_sample, first_sample + batch_size))

    def training_values(self, first_sample: int, stop: int) -> dict[str, Any]:
        return {}

    def position(self, sample: int) -> dict[str, int]:
        return {}

    def seek(self, sample: int, position: Mapping[str, int]) -> None:
        assert not position, "the index of a sample is sufficient"

    def after_update(self, step: int) -> None:
        self._averages.update(step)

    def after_init(self) -> None:
        self._averages.reset()

    def averaged(self) -> AbstractContextManager[None]:
        return self._averages.applied()

    def extra_state(self) -> Mapping:
        return self._averages.state()

    def close(self) -> None:
        remote_files.abandon()  # a thread may read ahead from a server that fails
        self._loader.close()


class ReadSet:
    """The first ``train.validation_batches`` batches of some samples (gpt4d.task.task.ValidationSet)."""

    def __init__(self, task: ReadingTask, source: Source, loader: Loader):
        self.task, self.source, self.loader = task, source, loader
        train = task.config.train
        self.steps = min(train.validation_batches, source.count // train.batch_size)

    @cached_property
    def units(self) -> int:
        return sum(self.task._counts(self.source, sample_ids).trained for sample_ids in self._batches())

    def batches(self, index: int) -> Iterator[Batch]:
        rows = self.loader.step(index * self.loader.batch_size)
        return itertools.starmap(partial(self.task._batch, held_out=True), rows)

    def text_bytes(self) -> int | None:
        return self._bytes

    @cached_property
    def _bytes(self) -> int | None:
        def count() -> int | None:
            counts = [self.task._text_bytes(self.source, sample_ids) for sample_ids in self._batches()]
            return None if None in counts else sum(filter(None, counts))

        return run_on_rank0(count, "counting the bytes of a validation set")

    def _batches(self) -> Iterator[np.ndarray]:
        """Yield the sample ids of each batch."""
        batch_size = self.loader.batch_size
        return (np.arange(index * batch_size, (index + 1) * batch_size) for index in range(self.steps))
