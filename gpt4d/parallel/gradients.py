"""What happens to gradients between the last backward and the optimizer: summed over the batch's axes, measured."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.grid import BATCH_AXES, Grid

_BUCKET_BYTES = 64 << 20


def sum_over_batch_axes(parameters: Sequence[nn.Parameter], grid: Grid) -> None:
    """Sums each gradient, in place, over the axes that split the batch but not the parameter.

    The stream of weights has summed those cut over z already; a rank's gradient of anything else is that of its own
    samples. Along x and y a parameter's copies see the same samples and need no sum.
    """
    for name in reversed(BATCH_AXES):  # z first: its groups are closer
        axis = grid[name]
        if axis.size > 1:
            for bucket in _buckets([p.grad for p in parameters if name not in p.spec.layout.axes]):
                flat = collectives.all_reduce(torch.cat([g.flatten() for g in bucket]), axis)
                summed = flat.split([g.numel() for g in bucket])
                torch._foreach_copy_(bucket, [s.view_as(g) for s, g in zip(summed, bucket, strict=True)])


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket, filled = [], 0
    for gradient in gradients:
        if bucket and filled + gradient.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(gradient)
        filled += gradient.nbytes
    if bucket:
        yield bucket


def counted_once(parameter: nn.Parameter, grid: Grid) -> bool:
    """Whether this rank is the one, of all that hold the same part of the parameter, that counts it."""
    return all(index == 0 for name, index in grid.indices.items() if name not in parameter.spec.layout.axes)


def squared_norm(parameters: Sequence[nn.Parameter], grid: Grid, device: torch.device) -> torch.Tensor:
    """This rank's share of the squared norm of the global gradient, in float64: summed over the world it is the whole.

    Every element of every parameter is counted once, whatever axes replicate it.
    """
    gradients = [p.grad for p in parameters if counted_once(p, grid)]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
