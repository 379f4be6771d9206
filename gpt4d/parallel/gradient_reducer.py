"""Reduction of gradients over the axes that split the batch, and the squared norm of the global gradient."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.engine.reduction import Bucket, GradientSums, default_bucket_bytes, gradient_buckets
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import spec_of
from gpt4d.parallel.sharded_weights import ShardedWeights


class GradientReducer:
    """Reduces gradients over the axes that split the batch but not the parameter.

    ``ShardedWeights`` has reduce-scattered the gradients of weights that z splits. The gradient of any other parameter
    covers this rank's samples only. Along x and y, replicas that act on the same tokens and heads have equal gradients
    and need no all-reduce. ``Context.batch_axes`` returns the axes that split samples, tokens or heads.

    Parameters fill buckets in reverse order, which is about the order of the backward. ``GradientSums`` decides when
    the reduction of a bucket starts. A bucket always has the same gradients, so the bits of a result do not depend on
    when its reduction starts.

    ``optimizer_shards`` are the parameters to optimize, in the order of ``parameters``. With ``shard`` (ZeRO, stage 1)
    they are this rank's rows of each weight along data. Gradients are then reduce-scattered, and
    ``start_param_all_gather`` gathers the updated rows in the compute dtype, to which layers cast every weight. So a
    parameter is exact only in the rows of its optimizer shard. In a computation with bf16, its other rows are rounded
    to bf16. A checkpoint saves the optimizer shards.

    Args:
        weights: the stage's sharded weights.
        parameters: the stage's parameters by global name.
        overlap: reductions overlap with the backward.
        bucket_bytes: size at which a bucket is closed; None for the default (gpt4d.parallel.engine.reduction).
        shard: split the optimizer's work over data.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        parameters: Mapping[str, nn.Parameter],
        overlap: bool = True,
        bucket_bytes: int | None = None,
        shard: bool = False,
    ):
        self.weights, self.parameters = weights, dict(parameters)
        self.optimizer_shards = [own_rows(p, weights.context.grid) if shard else p for p in parameters.values()]
        self._shard_of = dict(zip(parameters.values(), self.optimizer_shards, strict=True))
        specs = {name: spec_of(p) for name, p in parameters.items()}
        context, element_bytes = weights.context, torch.finfo(weights.dtype).bits // 8
        if bucket_bytes is None:
            gradient_bytes = sum(p.nbytes for p in parameters.values())
            bucket_bytes = default_bucket_bytes(gradient_bytes, context.grid.sizes, shard)
        buckets = list(
            gradient_buckets(specs, context.batch_axes, context.grid.sizes, shard, bucket_bytes, element_bytes)
        )
        # Weak, because the garbage collector does not see hooks: a strong reference makes a cycle that is never freed.
        this = weakref.proxy(self)
        self.sums: GradientSums[torch.Tensor, Pending] = GradientSums(this, buckets, overlap)
        self._names = {parameter: name for name, parameter in parameters.items()}
        for name in chain.from_iterable(bucket.names for bucket in buckets):
            if not specs[name].streamed:  # sharded weights report the gradients of weights that they gather
                parameters[name].register_post_accumulate_grad_hook(lambda p: this._on_gradient(p))
        weights.on_gradient = lambda p: this._on_gradient(p)
        if shard:
            weights.pre_gather_hook = lambda p: this._wait_param(p)

    def begin(self, contributions: Mapping[str, int], overlaps_backward: bool = True) -> None:
        """Start a step, which ``finish`` ends. Arguments as for ``GradientSums.begin``."""
        self.sums.begin(contributions, overlaps_backward)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        name = self._names.get(parameter)
        if name is not None:  # a copy of another stage's weight has no name
            self.sums.note_contribution(name)

    def finish(self) -> None:
        """End a step's backward: wait until ``grad`` of each optimizer shard is complete."""
        self.weights.schedule.finish()
        self.sums.finish()

    def start_param_all_gather(self) -> None:
        """Start the all-gather of the rows that other ranks have updated. Call it after the optimizer's step.

        The rows arrive during the next forward, which waits for a weight before its first use. Any other reader of
        parameters must call ``wait_params`` first. It reads rounded rows of other ranks.
        """
        self.sums.start_row_gathers()

    def wait_params(self) -> None:
        """Wait until every parameter is up to date."""
        self.sums.wait_all_rows()

    def _wait_param(self, parameter: nn.Parameter) -> None:
        if parameter in self._names:
            self.sums.wait_rows(self._names[parameter])

    # ------------------------------------------------- the operations of gpt4d.parallel.engine.reduction.GradientDevice

    def pack(self, bucket: Bucket) -> torch.Tensor:
        members = self._members(bucket)
        parts = self.weights.context.grid[bucket.axes[-1]].size if bucket.sharded else 1
        packed = _pack([_gradient(p) for p in members], parts)
        for parameter in members:
            parameter.grad = None
        return packed

    def start_sum(self, bucket: Bucket, kind: str, axis: str, packed: torch.Tensor) -> Pending:
        reduced = self.weights.context.grid[axis]
        return reduced.start_reduce_scatter(packed) if kind == "reduce_scatter" else reduced.start_all_reduce(packed)

    def wait(self, pending: Pending) -> torch.Tensor:
        return pending.wait()

    def unpack(self, bucket: Bucket, total: torch.Tensor) -> None:
        for parameter, piece in self._unpack(bucket, total):
            assert parameter.grad is None, "a gradient has more contributions than its description says"
            shard = self._shard_of[parameter]
            shard.grad = piece.reshape(shard.shape)

    def start_row_gather(self, bucket: Bucket) -> Pending:
        context, rows = self.weights.context, [self._shard_of[p].detach().flatten() for p in self._members(bucket)]
        packed = rows[0].new_empty((1, sum(map(len, rows))), dtype=context.compute_dtype)
        torch._foreach_copy_(list(packed[0].split([*map(len, rows)])), rows)
        return context.grid[bucket.axes[-1]].start_all_gather(packed)

    def write_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        axis = self.weights.context.grid[bucket.axes[-1]]
        targets, sources = [], []
        for parameter, piece in self._unpack(bucket, rows):
            shards = parameter.detach().view(axis.size, -1)
            for others in (slice(0, axis.index), slice(axis.index + 1, axis.size)):
                if others.start < others.stop:
                    targets.append(shards[others])
                    sources.append(piece[others])
        torch._foreach_copy_(targets, sources)

    def _members(self, bucket: Bucket) -> list[nn.Parameter]:
        return [self.parameters[name] for name in bucket.names]

    def _unpack(self, bucket: Bucket, packed: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter's columns, [parts, elements], of packed gradients or of some of their rows."""
        share = self.weights.context.grid[bucket.axes[-1]].size if bucket.sharded else 1
        members = self._members(bucket)
        return list(zip(members, packed.split([p.numel() // share for p in members], 1), strict=True))


def _pack(tensors: Iterable[torch.Tensor], parts: int) -> torch.Tensor:
    """Pack tensors into one tensor [parts, elements], whose row i contains part i of each tensor."""
    return torch.cat([tensor.reshape(parts, -1) for tensor in tensors], 1)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, f"no gradient of {spec_of(parameter)}"
    return parameter.grad


def own_rows(parameter: nn.Parameter, grid: Grid, dim: int | None = None) -> nn.Parameter:
    """Return a view of this rank's part of a parameter along data, or the parameter if data does not split it.

    ``dim``: the dim to split, as for ``ParameterSpec.over_data``.
    """
    spec = spec_of(parameter)
    split = spec.over_data(grid.sizes, dim)
    if grid.data.size == 1 or split == spec:
        return parameter
    (split_dim,) = (place for place, axes in enumerate(split.layout.dims) if "data" in axes)
    own: Any = nn.Parameter(parameter.detach().chunk(grid.data.size, split_dim)[grid.data.index])
    own.spec = split
    return own


def counted_once(parameter: nn.Parameter, grid: Grid) -> bool:
    """Return whether this rank counts its shard of a parameter, which exactly one of the shard's replicas does."""
    return all(index == 0 for name, index in grid.indices.items() if name not in spec_of(parameter).layout.axes)


def squared_norm(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return this rank's contribution to the squared norm of the global gradient, a float64 scalar.

    ``parameters``: the parameters or shards that this rank counts (``counted_once``). The sum over all ranks of the job
    counts every element of every parameter once.
    """
    gradients = [_gradient(p) for p in parameters]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
