"""ATP's linear layer for any torch model (ATP paper, Fig. 9): ``ATPLinear`` in place of ``nn.Linear``.

It is the linear layer that gpt4d trains with, on a grid with x = d1, y = d2 and z = 1, but without sharded weights.
Autograd computes the gradients of weights, so optimizers, autocast and activation checkpointing work as usual. A layer
holds process groups, which cannot be copied: copy its state dict, not the layer. Each rank has a shard of each
gradient, so the global gradient norm needs an all-reduce over the mesh.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Shard

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.linear import Matmul
from gpt4d.parallel.layers.product import FEATURES, ProductContext, multiply, start_gather
from gpt4d.parallel.stage_plan import ranks_in_grid_order

_PASS = Pass(recompute=True)  # the model may use activation checkpointing
COLUMN_FIRST, ROW_FIRST = (Shard(1), Shard(0)), (Shard(0), Shard(1))

_mesh: Grid | None = None


def init_mesh(shape: tuple[int, int], device_type: str | None = None) -> Grid:
    """Arrange the ranks of the job in DeviceMesh(d1, d2), which later ``ATPLinear`` layers use, and return it.

    Rank ``i·d2 + j`` has index i along the first dimension, ``mesh.x``, and j along the second, ``mesh.y``. If the job
    has more ranks, every d1·d2 consecutive ranks form a mesh, and
    ``DistributedDataParallel(model, process_group=mesh.data.group)`` averages gradients over the meshes. All ranks must
    call it after ``torch.distributed.init_process_group``.

    Args:
        shape: (d1, d2).
        device_type: ``cuda`` or ``cpu``; None for ``cuda`` if available, else ``cpu``.

    Raises ValueError if d1·d2 does not divide the number of ranks.
    """
    global _mesh
    (d1, d2), ranks = shape, dist.get_world_size()
    if min(shape) < 1 or ranks % (d1 * d2):
        raise ValueError(f"shape={shape}: does not divide the {ranks} rank(s) of the job; use d1·d2 = {ranks}")
    sizes = GridSizes(d1, d2, 1, ranks // (d1 * d2))
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    _mesh = Grid(sizes, device_type, ranks_in_grid_order(sizes, rank_order="yx"))
    return _mesh


def _current(mesh: Grid | None) -> Grid:
    if mesh is None and _mesh is None:
        raise ValueError("there is no mesh; call init_mesh((d1, d2)) first")
    return mesh or _mesh  # type: ignore[return-value]


def _check(key: str, features: int, axis: Axis) -> None:
    if features % axis.size:
        name = "d1" if axis.name == "x" else "d2"
        raise ValueError(f"{key}={features}: not divisible by {name}={axis.size}; use a multiple of it")


class _Weights:
    """Replaces ``ShardedWeights`` in one call of one chunk, for a weight that is not gathered: it has no schedule."""

    def __init__(self, context: Context):
        self.context = context

    def trains(self, weight: nn.Parameter) -> bool:
        return True

    def gather(self, weight: nn.Parameter, phase: str | None = None) -> torch.Tensor:
        return weight.detach().to(self.context.compute_dtype)

    def add_gradient(self, weight: nn.Parameter, compute: Callable[[None], torch.Tensor]) -> torch.Tensor:
        return compute(None)  # autograd accumulates it


class ATPLinear(nn.Module):
    """``x·W + b`` on a mesh, W [in_features, out_features] sharded over both of its dimensions.

    With ``[Shard(1), Shard(0)]``, column-first, d1 splits the columns of W and d2 its rows. The layer takes x
    [..., in_features / d2] and returns [..., out_features / d1]. ``[Shard(0), Shard(1)]``, row-first, is its
    counterpart: [..., in_features / d1] → [..., out_features / d2]. Alternate the two strategies.

    Args:
        in_features: number of features of the unsharded input.
        out_features: number of features of the unsharded output.
        shard_strategy: the placement of W on each dimension of the mesh.
        bias: add a bias, which is sharded like the output.
        device: the parameters' device.
        dtype: the parameters' dtype.
        mesh: the mesh; None for the mesh of the last ``init_mesh``.

    The initial values equal the initial values of ``nn.Linear`` with the same generator state, which must be the same
    on all ranks. Raises ValueError for any other strategy, and for features that the mesh does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        shard_strategy: Sequence[Shard],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: Grid | None = None,
    ):
        super().__init__()
        mesh = _current(mesh)
        if tuple(shard_strategy) not in (COLUMN_FIRST, ROW_FIRST):
            raise ValueError(f"shard_strategy={shard_strategy}: use [Shard(1), Shard(0)] or [Shard(0), Shard(1)]")
        transposed = tuple(shard_strategy) == ROW_FIRST
        contracted, produced = (mesh.x, mesh.y) if transposed else (mesh.y, mesh.x)
        _check("in_features", in_features, contracted)
        _check("out_features", out_features, produced)
        full = nn.Linear(in_features, out_features, bias, dtype=dtype)
        with torch.no_grad():
            rows = full.weight.t().chunk(contracted.size, 0)[contracted.index]
            weight = rows.chunk(produced.size, 1)[produced.index]
            self.weight = nn.Parameter(weight.contiguous().to(device))
            part = full.bias.chunk(produced.size)[produced.index].clone().to(device) if bias else None
            self.bias = nn.Parameter(part) if part is not None else None
        self.mesh, self.contracted, self.produced, self.transposed = mesh, contracted, produced, transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device, dtype = x.device.type, self.weight.dtype
        compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        weights = _Weights(Context(self.mesh, compute_dtype))
        context = ProductContext(weights, Matmul(), self.contracted, self.produced, self.transposed)  # type: ignore[arg-type]
        return run_alone(multiply(x.to(compute_dtype), self.weight, self.bias, context, _PASS))  # type: ignore[return-value]

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{rows}·{self.contracted.size}, {columns}·{self.produced.size}"


class SplitFunction(torch.autograd.Function):
    """Replicated features [..., features] → this rank's shard over d2; the backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx, x, mesh: Grid):
        ctx.mesh = mesh
        return x.chunk(mesh.y.size, -1)[mesh.y.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_part):
        return start_gather(d_part, ctx.mesh.y, FEATURES).wait(), None


class GatherFunction(torch.autograd.Function):
    """All-gather of features over d2, [..., features / d2] → [..., features]; the backward takes the rank's shard."""

    @staticmethod
    def forward(ctx, part, mesh: Grid):
        ctx.mesh = mesh
        return start_gather(part, mesh.y, FEATURES).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_full):
        return d_full.chunk(ctx.mesh.y.size, -1)[ctx.mesh.y.index].contiguous(), None


def split_features(x: torch.Tensor, mesh: Grid | None = None) -> torch.Tensor:
    """Return this rank's shard of replicated features, [..., features] → [..., features / d2].

    Raises ValueError for features that d2 does not divide.
    """
    _check("features", x.shape[-1], _current(mesh).y)
    return SplitFunction.apply(x, _current(mesh))


def gather_features(part: torch.Tensor, mesh: Grid | None = None) -> torch.Tensor:
    """All-gather features over the second dimension, [..., features / d2] → [..., features]."""
    return GatherFunction.apply(part, _current(mesh))
