"""Batches of samples, which threads prefetch; for a GPU into pinned memory."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gpt4d.runtime import gpu

_SPAN_ELEMENTS = 2**20  # elements per task, since waking a thread takes as long as copying 50,000 tokens


class Counts(NamedTuple):
    """Numbers of units of some samples: ``trained`` units have a loss, ``unpadded`` ones are no padding."""

    trained: int
    unpadded: int


class Batch(NamedTuple):
    """Inputs, targets and sample ids of one microbatch; the first dim of every tensor is the microbatch."""

    inputs: dict[str, Any]  # tensors or their metadata, by the names of the model's inputs
    targets: torch.Tensor | None  # None for a task without targets
    sample_ids: torch.Tensor  # [microbatch]: the global index of each sample in the run
    masked: bool = False  # tokens with a negative target have no loss
    sources: torch.Tensor | None = None  # [microbatch]: index of each sample's source in a blend, to report its losses


class Source(Protocol):
    """Samples that a run reads, each a row of an array.

    Attributes:
        count: samples of an epoch.
        row_shape: shape of a row: (length + 1,) for tokens, (height, width, channels) for images.
    """

    count: int
    row_shape: tuple[int, ...]

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as an array [n, *row_shape] in the files' dtype."""


class Loader:
    """Microbatches of this rank's shard of each global batch, for ``device``.

    A microbatch consists of consecutive samples of the global batch, which the shards split. So pipeline stages with
    different numbers of shards have the same samples in a microbatch. Ranks with the same ``shard`` (0 to ``shards`` -
    1) read the same samples, and no sample is in two shards.
    ``micro_batch_size`` None means one microbatch per step. Each of ``workers`` threads prefetches two spans. A span
    consists of the steps with about a million of this rank's elements (tokens, or bytes of images), at least one step.
    The batches do not depend on ``workers``, which may be 0. If ``reads`` is false, this rank only needs sample ids,
    and its rows are int64 zeros.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        shard: int,
        shards: int,
        micro_batch_size: int | None,
        device: torch.device,
        workers: int,
        reads: bool = True,
    ):
        self.source, self.batch_size, self.device, self.workers = source, batch_size, device, workers
        self.shard_size = batch_size // shards
        self.micro_batch_size = micro_batch_size or self.shard_size
        parts = np.arange(batch_size).reshape(-1, shards, self.micro_batch_size)
        self.places = parts[:, shard]  # [microbatches, microbatch]: this rank's samples of a global batch
        self.waited_s = 0.0  # time that steps waited for data since the caller last set this to 0
        self._nothing = None if reads else torch.zeros((), dtype=torch.int64, device=device)
        self._threads = ThreadPoolExecutor(workers, "loader", gpu.select, (device,)) if workers and reads else None
        steps = round(_SPAN_ELEMENTS / (self.shard_size * math.prod(source.row_shape)))
        self._steps_per_span = max(1, min(steps, source.count // batch_size))
        self._ready: dict[int, torch.Tensor] = {}  # rows of a step, by its first sample id
        self._pending: dict[int, Future[torch.Tensor]] = {}  # spans, by the first sample id of their first step

    def step(self, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows and sample ids of the microbatches of the global batch that begins with sample ``first``.

        The rows are [microbatch, *row_shape] in the files' dtype, since smaller elements move to a GPU faster. Rows
        that are read are on the host, in pinned memory for a GPU. The sample ids are int64 [microbatch] on the device.
        """
        rows = self._rows(first)
        for places, part in zip(self.places, rows.split(self.micro_batch_size), strict=True):
            first_id = first + int(places[0])
            sample_ids = torch.arange(first_id, first_id + self.micro_batch_size, device=self.device)
            yield part, sample_ids

    def _rows(self, first: int) -> torch.Tensor:
        if self._nothing is not None:
            return self._nothing.expand(self.shard_size, *self.source.row_shape)
        started = time.perf_counter()
        if first not in self._ready:
            self._ready = self._load_steps(first)
        self.waited_s += time.perf_counter() - started
        return self._ready[first]

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _load_steps(self, first: int) -> dict[int, torch.Tensor]:
        """Return the step that begins with ``first`` and the rest of its span. Start to prefetch the next spans."""
        pending = self._pending.pop(first, None)
        span = pending.result() if pending else self._read(first, steps=1)
        if self._threads:
            after, stride = first + len(span) * self.batch_size, self._steps_per_span * self.batch_size
            starts = [after + index * stride for index in range(2 * self.workers)]  # two per thread: no thread is idle
            self._pending = {
                start: self._pending.get(start) or self._threads.submit(self._read, start, self._steps_per_span)
                for start in starts
            }
        return {first + step * self.batch_size: rows for step, rows in enumerate(span)}

    def _read(self, first: int, steps: int) -> torch.Tensor:
        """Return [steps, shard size, *row_shape] in the files' dtype: uint16 takes a quarter of int64's bytes."""
        starts = first + np.arange(steps) * self.batch_size
        sample_ids = (starts[:, None] + self.places.ravel()).ravel()
        rows = torch.from_numpy(self.source.rows(sample_ids)).view(steps, self.shard_size, *self.source.row_shape)
        return rows.pin_memory() if self.device.type != "cpu" else rows
