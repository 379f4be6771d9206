"""Batches of sequences, read ahead by threads; for a GPU into pinned memory."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gpt4d.data.batch import Batch
from gpt4d.data.sampler import Blend, Sequences

_SPAN_TOKENS = 2**20  # read in one task, since waking another thread costs as much as copying 50,000 tokens


class Loader:
    """Microbatches of this rank's shard of each global batch, on ``device``.

    A microbatch is a part of the global batch, of consecutive samples, which the shards split: stages that split it
    differently have the same samples in it. Ranks with the same ``shard`` (0 to ``shards`` - 1) read the same
    sequences, and no sequence is in two shards.
    ``micro_batch_size`` None means one microbatch per step. Each of ``workers`` threads reads two spans ahead; a span
    is the steps that hold about a million of this rank's tokens, at least one step. The batches do not depend on
    ``workers``, which may be 0. ``reads`` false: this rank only needs the numbers of its samples; all tokens are 0.
    """

    def __init__(
        self,
        sequences: Sequences | Blend,
        batch_size: int,
        shard: int,
        shards: int,
        micro_batch_size: int | None,
        device: torch.device,
        workers: int,
        reads: bool = True,
    ):
        self.sequences, self.batch_size, self.device, self.workers = sequences, batch_size, device, workers
        self.shard_size = batch_size // shards
        self.micro_batch_size = micro_batch_size or self.shard_size
        parts = np.arange(batch_size).reshape(-1, shards, self.micro_batch_size)
        self.places = parts[:, shard]  # [microbatches, microbatch]: this rank's samples of a global batch
        self.waited_s = 0.0  # time that steps waited for data since the caller last set this to 0
        self._nothing = None if reads else torch.zeros((), dtype=torch.int64, device=device)
        self._threads = ThreadPoolExecutor(workers, "loader") if workers and reads else None
        steps = min(_SPAN_TOKENS // (self.shard_size * sequences.length), sequences.count // batch_size)
        self._steps_per_span = max(1, steps)
        self._ready: dict[int, torch.Tensor] = {}  # rows of a step, by its first sample id
        self._pending: dict[int, Future[torch.Tensor]] = {}  # spans, by the first sample id of their first step

    def step(self, first: int) -> Iterator[Batch]:
        """Yield the microbatches of the global batch that begins with sample ``first``.

        ``inputs["ids"]`` and ``targets`` are [microbatch, length], ``sample_ids`` [microbatch], all int64.
        """
        rows = self._rows(first)
        for places, part in zip(self.places, rows.split(self.micro_batch_size), strict=True):
            first_id = first + int(places[0])
            sample_ids = torch.arange(first_id, first_id + self.micro_batch_size, device=self.device)
            moved = part.to(self.device, non_blocking=True).long()
            yield Batch({"ids": moved[:, :-1]}, moved[:, 1:], sample_ids)

    def _rows(self, first: int) -> torch.Tensor:
        if self._nothing is not None:
            return self._nothing.expand(self.shard_size, self.sequences.length + 1)
        started = time.perf_counter()
        if first not in self._ready:
            self._ready = self._load_steps(first)
        self.waited_s += time.perf_counter() - started
        return self._ready[first]

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _load_steps(self, first: int) -> dict[int, torch.Tensor]:
        """Return the step that begins with ``first`` and the rest of its span; start to read the next spans."""
        pending = self._pending.pop(first, None)
        span = pending.result() if pending else self._read(first, steps=1)
        if self._threads:
            after, stride = first + len(span) * self.batch_size, self._steps_per_span * self.batch_size
            starts = [after + index * stride for index in range(2 * self.workers)]  # two per thread keep all busy
            self._pending = {
                start: self._pending.get(start) or self._threads.submit(self._read, start, self._steps_per_span)
                for start in starts
            }
        return {first + step * self.batch_size: rows for step, rows in enumerate(span)}

    def _read(self, first: int, steps: int) -> torch.Tensor:
        """Return [steps, shard size, length + 1] in the files' dtype: uint16 takes a quarter of int64's bytes."""
        starts = first + np.arange(steps) * self.batch_size
        sample_ids = (starts[:, None] + self.places.ravel()).ravel()
        rows = torch.from_numpy(self.sequences.rows(sample_ids)).view(steps, self.shard_size, -1)
        return rows.pin_memory() if self.device.type == "cuda" else rows
