"""Batches that are there when a step needs them: threads read ahead, on a GPU into pinned memory."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gpt4d.data import sampler
from gpt4d.data.sampler import Blend, Sequences

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Loader:
    """This rank's share of each global batch, a microbatch at a time, on ``device``.

    ``shard`` of ``shards`` is the part of the batch. Ranks with the same shard read the same sequences, others none of
    them. ``workers`` steps are read ahead, by as many threads; what is read does not depend on it.
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
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def step(self, first: int) -> Iterator[Batch]:
        """Of the global batch that begins with sequence ``first``: inputs, targets, numbers of each microbatch."""
        started = time.perf_counter()
        here = self._ahead.pop(first, None)
        batches = here.result() if here else self._read(first)
        self.waited_s += time.perf_counter() - started
        wanted = [first + ahead * self.batch_size for ahead in range(1, self.workers + 1)]
        self._ahead = {at: self._ahead.get(at) or self._threads.submit(self._read, at) for at in wanted}
        for tensors in batches:
            yield tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _read(self, first: int) -> list[Batch]:
        first += self.offset
        read = (sampler.batch(self.sequences, at, self.size) for at in range(first, first + self.share, self.size))
        pinned = self.device.type == "cuda"
        return [tuple(tensor.pin_memory() if pinned else tensor for tensor in tensors) for tensors in read]
