"""What happens to gradients between the layers and the optimizer: summed over the batch's axes, measured."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from gpt4d.parallel import collectives, limits
from gpt4d.parallel.collectives import Pending
from gpt4d.parallel.grid import BATCH_AXES, Axis, Grid
from gpt4d.parallel.layout import over_data
from gpt4d.parallel.weights import WeightStream


class _Bucket(NamedTuple):
    """Parameters whose gradients travel as one."""

    parameters: tuple[nn.Parameter, ...]
    axes: tuple[Axis, ...]  # to sum over, inner first
    sharded: bool  # each rank of the last axis wants its rows of the sum only

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of what ``_packed`` gave, or of some of its parts: the tensors of the parameters, each [parts, elements]."""
        share = self.axes[-1].size if self.sharded else 1
        return packed.split([p.numel() // share for p in self.parameters], 1)


def _packed(tensors: Iterable[torch.Tensor], parts: int) -> torch.Tensor:
    """Tensors as one [parts, elements]: the first rows of all, the second rows of all…"""
    return torch.cat([tensor.reshape(parts, -1) for tensor in tensors], 1)


class GradientReducer:
    """Sums gradients over the axes that split the batch but not the parameter.

    The stream of weights has summed those cut over z already; a rank's gradient of anything else is that of its own
    samples. Along x and y a parameter's copies see the same samples and need no sum.

    Parameters fill buckets in the reverse of their order, which is about that of the backward. A bucket sets off when
    the last gradient of it is complete, behind the backward of the layers before it: how many contributions complete a
    gradient is what the last step had. Which gradients share a bucket never changes, so that a sum has the same bits
    however early it began.

    ``owned`` are the parameters to optimize, in the order of ``parameters``. With ``shard`` (ZeRO, stage 1) a rank owns
    only its rows of each weight along data: gradients are reduce-scattered, and ``spread`` gathers what was updated.
    """

    def __init__(
        self,
        weights: WeightStream,
        parameters: Sequence[nn.Parameter],
        overlap: bool = True,
        bucket_bytes: int | None = None,
        shard: bool = False,
    ):
        self.weights, self.overlap = weights, overlap
        self.owned = [_own_rows(p, weights.grid) if shard else p for p in parameters]
        self._owned = dict(zip(parameters, self.owned, strict=True))
        if bucket_bytes is None:
            bucket_bytes = limits.bucket_bytes(sum(p.nbytes for p in parameters))
        cut = {p for p, own in self._owned.items() if own is not p}
        self.buckets = list(_buckets(parameters, cut, weights.grid, bucket_bytes))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._expected: Counter[nn.Parameter] = Counter()  # contributions to a gradient in the last step
        self._added: Counter[nn.Parameter] = Counter()  # and so far in this one
        self._sent: dict[_Bucket, Pending] = {}
        self._arriving: dict[_Bucket, Pending] = {}  # what other ranks updated
        # Hooks live as long as their tensors, where the garbage collector does not see them: no strong reference back.
        this = weakref.ref(self)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: this()._on_gradient(p))
        weights.on_gradient = lambda p: this()._on_gradient(p)
        weights.pre_gather_hook = lambda p: this()._arrive(this()._bucket_of.get(p))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._added[parameter] += 1
        bucket = self._bucket_of.get(parameter)
        if self.overlap and bucket and all(self._added[p] == self._expected[p] for p in bucket.parameters):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        self._sent[bucket] = self._start_sum(bucket, [p.grad for p in bucket.parameters])
        for parameter in bucket.parameters:
            parameter.grad = None  # should another contribution come after all, it is found there by itself

    def _start_sum(self, bucket: _Bucket, gradients: list[torch.Tensor]) -> Pending:
        *inner, last = bucket.axes
        packed = _packed(gradients, last.size if bucket.sharded else 1)
        for axis in inner:
            collectives.all_reduce(packed, axis)
        start = collectives.start_reduce_scatter if bucket.sharded else collectives.start_all_reduce
        return start(packed, last)

    def finish(self) -> None:
        """Ends a step's backward: the gradients of all parameters are whole, in ``grad`` of those owned."""
        self.weights.finish()
        for bucket in self.buckets:
            if bucket not in self._sent:
                self._send(bucket)
        for bucket, pending in self._sent.items():
            total = pending.wait()
            late = [p.grad for p in bucket.parameters]
            if any(g is not None for g in late):  # the model used a parameter more often than the last time
                late = [torch.zeros_like(p) if g is None else g for p, g in zip(bucket.parameters, late, strict=True)]
                total = total + self._start_sum(bucket, late).wait()
            for parameter, piece in zip(bucket.parameters, bucket.unpack(total), strict=True):
                parameter.grad = None
                owned = self._owned[parameter]
                owned.grad = piece.reshape(owned.shape)
        self._sent.clear()
        self._expected, self._added = self._added, Counter()

    def spread(self) -> None:
        """Sends for the rows that other ranks updated. Called after the optimizer's step.

        They arrive behind the next forward, which waits for a weight when it first needs it; whoever else reads
        parameters calls ``arrive`` before.
        """
        for bucket in reversed(self.buckets):  # in the order of the forward
            if bucket.sharded:
                rows = _packed([self._owned[p].detach() for p in bucket.parameters], 1)
                self._arriving[bucket] = collectives.start_all_gather(rows, bucket.axes[-1])
        if not self.overlap:
            self.arrive()

    def arrive(self) -> None:
        """Returns when every parameter is up to date."""
        for bucket in list(self._arriving):
            self._arrive(bucket)

    def _arrive(self, bucket: _Bucket | None) -> None:
        if bucket in self._arriving:
            pieces = bucket.unpack(self._arriving.pop(bucket).wait())
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                parameter.detach().view(len(piece), -1).copy_(piece)


def _own_rows(parameter: nn.Parameter, grid: Grid) -> nn.Parameter:
    """This rank's rows along data of a parameter, on its memory; the parameter itself if data does not cut it."""
    layout = over_data(parameter.spec.shape, parameter.spec.layout, grid.sizes._asdict())
    if grid.data.size == 1 or layout == parameter.spec.layout:
        return parameter
    own = nn.Parameter(parameter.detach().chunk(grid.data.size)[grid.data.index])
    own.spec = replace(parameter.spec, layout=layout)
    return own


def _buckets(
    parameters: Sequence[nn.Parameter], cut: set[nn.Parameter], grid: Grid, bucket_bytes: int
) -> Iterator[_Bucket]:
    filling: dict[tuple, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        names = [name for name in reversed(BATCH_AXES) if name not in parameter.spec.layout.axes]
        axes = tuple(grid[name] for name in names if grid[name].size > 1)
        if axes:
            kind = axes, parameter in cut
            bucket = filling.setdefault(kind, [])
            bucket.append(parameter)
            if sum(p.nbytes for p in bucket) >= bucket_bytes:
                yield _Bucket(tuple(filling.pop(kind)), *kind)
    for kind, bucket in filling.items():
        yield _Bucket(tuple(bucket), *kind)


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
