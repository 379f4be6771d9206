"""What happens to gradients between the layers and the optimizer: summed over the batch's axes, measured."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.collectives import Pending
from gpt4d.parallel.grid import BATCH_AXES, Axis, Grid
from gpt4d.parallel.weights import WeightStream


class _Bucket(NamedTuple):
    """Parameters whose gradients travel as one."""

    parameters: tuple[nn.Parameter, ...]
    axes: tuple[Axis, ...]  # to sum over, inner first


class GradientSum:
    """Sums gradients over the axes that split the batch but not the parameter.

    The stream of weights has summed those cut over z already; a rank's gradient of anything else is that of its own
    samples. Along x and y a parameter's copies see the same samples and need no sum.

    Parameters fill buckets in the reverse of their order, which is about that of the backward. A bucket sets off when
    the last gradient of it is complete, behind the backward of the layers before it: how many contributions complete a
    gradient is what the last step had. Which gradients share a bucket never changes, so that a sum has the same bits
    however early it began.
    """

    def __init__(
        self,
        weights: WeightStream,
        parameters: Sequence[nn.Parameter],
        overlap: bool = True,
        bucket_bytes: int = 8 << 20,
    ):
        self.weights, self.overlap = weights, overlap
        self.buckets = list(_buckets(parameters, weights.grid, bucket_bytes))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._expected: Counter[nn.Parameter] = Counter()  # contributions to a gradient in the last step
        self._added: Counter[nn.Parameter] = Counter()  # and so far in this one
        self._sent: dict[_Bucket, Pending] = {}
        # Hooks live as long as their tensors, where the garbage collector does not see them: no strong reference back.
        this = weakref.ref(self)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: this()._on_gradient(p))
        weights.on_gradient = lambda p: this()._on_gradient(p)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._added[parameter] += 1
        bucket = self._bucket_of.get(parameter)
        if self.overlap and bucket and all(self._added[p] == self._expected[p] for p in bucket.parameters):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        gradients = [p.grad for p in bucket.parameters]
        flat = torch.cat([g.flatten() for g in gradients])
        for parameter in bucket.parameters:
            parameter.grad = None  # should another contribution come after all, it is found there by itself
        *inner, last = bucket.axes
        for axis in inner:
            collectives.all_reduce(flat, axis)
        self._sent[bucket] = collectives.start_all_reduce(flat, last)

    def finish(self) -> None:
        """Ends a step's backward: the gradients of all parameters are whole, in ``parameter.grad``."""
        self.weights.finish()
        for bucket in self.buckets:
            if bucket not in self._sent:
                self._send(bucket)
        for bucket, pending in self._sent.items():
            pieces = pending.wait().split([p.numel() for p in bucket.parameters])
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                late, parameter.grad = parameter.grad, piece.view_as(parameter)
                if late is not None:  # the model used the parameter more often than the last time
                    for axis in bucket.axes:
                        collectives.all_reduce(late, axis)
                    parameter.grad += late
        self._sent.clear()
        self._expected, self._added = self._added, Counter()


def _buckets(parameters: Sequence[nn.Parameter], grid: Grid, bucket_bytes: int) -> Iterator[_Bucket]:
    filling: dict[tuple[Axis, ...], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        names = [name for name in reversed(BATCH_AXES) if name not in parameter.spec.layout.axes]
        axes = tuple(grid[name] for name in names if grid[name].size > 1)
        if axes:
            bucket = filling.setdefault(axes, [])
            bucket.append(parameter)
            if sum(p.nbytes for p in bucket) >= bucket_bytes:
                yield _Bucket(tuple(filling.pop(axes)), axes)
    for axes, bucket in filling.items():
        yield _Bucket(tuple(bucket), axes)


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
