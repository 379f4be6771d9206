"""The training losses of the sources of a blend."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpt4d.data.batch import Counts
from gpt4d.data.sampler import Blend
from gpt4d.parallel.stage import Stage
from gpt4d.step import mask_replicas


class SourceLosses:
    """Sums of the training losses of each source of a blend since the last call of ``read``.

    The sums stay on the device, so that a step needs no communication for them.

    Args:
        blend: the training samples.
        names: the names of its sources.
        counts: returns the numbers of units. Arguments: a source and sample ids within the source.
        stage: the stage of this rank.
    """

    def __init__(self, blend: Blend, names: Sequence[str], counts: Callable[[Any, np.ndarray], Counts], stage: Stage):
        self._blend, self._names, self._counts, self._grid = blend, names, counts, stage.grid
        device = stage.weights.device
        tables = blend.firsts, blend.periods, blend.offsets, blend.choices
        self._firsts, self._periods, self._offsets, self._choices = (
            torch.from_numpy(table).to(device) for table in tables
        )
        self._indices = torch.arange(len(names), device=device)[:, None]
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=device)

    def sources(self, sample_ids: torch.Tensor) -> torch.Tensor:
        """Return the index of each sample's source."""
        stages = torch.bucketize(sample_ids, self._firsts, right=True) - 1
        places = (sample_ids - self._firsts[stages]) % self._periods[stages] + self._offsets[stages]
        return self._choices[places]

    def add(self, sources_B: torch.Tensor, losses_BS: torch.Tensor) -> None:
        """Add the losses of a microbatch's units, given the source of each sample."""
        losses_B = losses_BS.sum(1, dtype=torch.float64)
        self._sums += torch.where(sources_B == self._indices, losses_B, 0).sum(1)

    def read(self, sample_ids: np.ndarray) -> dict[str, float | None]:
        """Return the mean loss per unit of each source over the samples since the last call, and start new sums.

        ``sample_ids``: these samples. A source without a sample among them has None. All ranks call this together.
        """
        sums = self._grid.world.all_reduce(mask_replicas(self._sums, self._grid)).tolist()
        self._sums.zero_()
        parts = zip(self._blend.sources, self._blend.by_source(sample_ids), strict=True)
        counts = [self._counts(source, source_ids).trained if len(source_ids) else 0 for source, source_ids in parts]
        means = (total / count if count else None for total, count in zip(sums, counts, strict=True))
        return dict(zip(self._names, means, strict=True))
