"""Batches that are there when a step needs them: threads read ahead, on a GPU into pinned memory."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gpt4d.data.sampler import Blend, Sequences

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_SPAN = 2**20  # tokens read ahead at once: to wake another thread costs as much as to copy 50,000


class Loader:
    """This rank's share of each global batch, a microbatch at a time, on ``device``.

    ``shard`` of ``shards`` is the part of the batch. Ranks with the same shard read the same sequences, others none of
    them. ``workers`` threads read ahead: twice as many spans, each of the steps that make up about a million tokens of
    this rank's, at least one. What is read does not depend on it.
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
    ):
        self.sequences, self.batch_size, self.device, self.workers = sequences, batch_size, device, workers
        self.share = batch_size // shards
        self.offset = shard * self.share
        self.size = micro_batch_size or self.share
        self.waited_s = 0.0  # by the training, for data, since it was last set to 0
        self._threads = ThreadPoolExecutor(workers, "loader") if workers else None
        most = min(_SPAN // (self.share * sequences.length), sequences.count // batch_size)
        self._steps_at_once = max(1, most)
        self._here: dict[int, torch.Tensor] = {}  # steps, by their first sequence
        self._ahead: dict[int, Future[torch.Tensor]] = {}  # several steps each, by the first one's

    def step(self, first: int) -> Iterator[Batch]:
        """Of the global batch that begins with sequence ``first``: inputs and targets [microbatch, length] and numbers
        [microbatch] of each microbatch, all int64."""
        started = time.perf_counter()
        if first not in self._here:
            self._here = self._steps_from(first)
        rows = self._here[first]
        self.waited_s += time.perf_counter() - started
        for start in range(0, self.share, self.size):
            number = first + self.offset + start
            numbers = torch.arange(number, number + self.size, device=self.device)
            moved = rows[start : start + self.size].to(self.device, non_blocking=True).long()
            yield moved[:, :-1], moved[:, 1:], numbers

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _steps_from(self, first: int) -> dict[int, torch.Tensor]:
        """The step that begins with ``first``, and those that were read with it. Has the next ones read."""
        expected = self._ahead.pop(first, None)
        read = expected.result() if expected else self._read(first, steps=1)
        after, stride = first + len(read) * self.batch_size, self._steps_at_once * self.batch_size
        wanted = [after + place * stride for place in range(2 * self.workers)]  # so that no thread is ever idle
        self._ahead = {
            at: self._ahead.get(at) or self._threads.submit(self._read, at, self._steps_at_once) for at in wanted
        }
        return {first + step * self.batch_size: rows for step, rows in enumerate(read)}

    def _read(self, first: int, steps: int) -> torch.Tensor:
        """[steps, share, length + 1], as the files have them: a quarter of the bytes to keep and to send to a GPU."""
        begins = first + self.offset + np.arange(steps) * self.batch_size
        rows = self.sequences.rows((begins[:, None] + np.arange(self.share)).ravel())
        rows = torch.from_numpy(rows).view(steps, self.share, -1)
        return rows.pin_memory() if self.device.type == "cuda" else rows
