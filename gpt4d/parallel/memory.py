"""What a rank keeps of a model's training state, by the layouts alone."""

import math
from collections.abc import Iterable

from torch import nn

from gpt4d.parallel.grid import Grid

_STATES = 2  # AdamW's averages of the gradient and of its square


def by_layouts(parameters: Iterable[nn.Parameter], owned: Iterable[nn.Parameter], grid: Grid) -> dict[str, int]:
    """Bytes on this rank: ``weights`` and ``optimizer`` stay, ``gradients`` come and go with each step.

    Activations, gathered weights and the buffers of collectives come on top, at the peak of a step.
    """
    weights = _bytes(parameters, grid)
    return {"weights": weights, "gradients": weights, "optimizer": _STATES * _bytes(owned, grid)}


def _bytes(parameters: Iterable[nn.Parameter], grid: Grid) -> int:
    return sum(math.prod(grid.local_shape(p.spec.shape, p.spec.layout)) * p.element_size() for p in parameters)
