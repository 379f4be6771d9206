"""ATP's library surface: layers of plain torch models on a mesh, and their communication."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples import atp_mlp
from gpt4d.parallel.atp import ATPLinear, gather_features, init_mesh, split_features

COLUMN_FIRST, ROW_FIRST = [Shard(1), Shard(0)], [Shard(0), Shard(1)]


def mlp(x, up, down):
    return down(nn.functional.gelu(up(x)))


def compare_with_plain_torch(shape, recompute):
    """On a rank: errors of output, input gradient and gradients of an MLP on the mesh."""
    mesh = init_mesh(shape, "cpu")
    torch.manual_seed(0)
    layers = ATPLinear(8, 16, COLUMN_FIRST, dtype=torch.float64), ATPLinear(16, 8, ROW_FIRST, dtype=torch.float64)
    torch.manual_seed(0)
    plain = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)
    x, upstream = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = split_features(mine)
    out = checkpoint(mlp, hidden, *layers, use_reentrant=False) if recompute else mlp(hidden, *layers)
    out = gather_features(out)
    expected = mlp(theirs, *plain)
    out.backward(upstream)
    expected.backward(upstream)
    pairs = [(out, expected), (mine.grad, theirs.grad)]
    for layer, whole, (rows, columns) in zip(layers, plain, ((mesh.y, mesh.x), (mesh.x, mesh.y)), strict=True):
        part = whole.weight.grad.t().chunk(rows.size, 0)[rows.index].chunk(columns.size, 1)[columns.index]
        pairs += [(layer.weight.grad, part), (layer.bias.grad, whole.bias.grad.chunk(columns.size)[columns.index])]
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize(("shape", "recompute"), [((4, 1), False), ((2, 2), True), ((2, 2), False), ((1, 4), True)])
def test_an_mlp_on_a_mesh_computes_what_nn_linear_does(ranks, shape, recompute):
    for errors in ranks.run(4, compare_with_plain_torch, shape, recompute):
        assert max(errors) <= 1e-13


def test_the_example_trains_as_plain_torch_does(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(2, 32, 64)
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ranks.run(4, atp_mlp.train, torch.device("cpu")) == [pytest.approx(loss.item(), rel=1e-4)] * 4


def parallel_copies():
    """On a rank of two meshes of two devices, whose inputs differ: a weight's gradient, averaged by DDP."""
    mesh = init_mesh((2, 1), "cpu")
    model = DistributedDataParallel(ATPLinear(4, 2, COLUMN_FIRST), process_group=mesh.data.group)
    model(torch.full((3, 4), 1.0 + 2 * mesh.data.index)).sum().backward()
    return model.module.weight.grad.tolist()


def test_distributed_data_parallel_averages_gradients_of_several_meshes(ranks):
    assert ranks.run(4, parallel_copies) == [[[3 * (1.0 + 3.0) / 2]] * 4] * 4


def plain_usage():
    """On one device: what nn.Linear does, in unusual ways, and the same with the layer."""
    init_mesh((1, 1), "cpu")
    torch.manual_seed(0)
    layer = ATPLinear(8, 4, COLUMN_FIRST)
    torch.manual_seed(0)
    plain, results = nn.Linear(8, 4), []
    for module in (layer, plain):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(torch.ones(3, 8, requires_grad=True))
        out.float().square().sum().backward()
        one_row, no_rows = module(torch.ones(8)), module(torch.ones(0, 8))
        module.double()
        gradient = module.weight.grad if module is layer else module.weight.grad.t()
        double = module(torch.ones(2, 8, dtype=torch.float64))
        results.append([out, gradient, one_row, no_rows, double])
        module.weight.requires_grad_(False)
        module(torch.ones(2, 8, dtype=torch.float64, requires_grad=True)).sum().backward()
    return [
        (a.shape == b.shape and a.dtype == b.dtype, ((a - b).norm() / max(b.norm(), 1e-9)).item())
        for a, b in zip(*results, strict=True)
    ]


def test_a_layer_works_with_autocast_other_dtypes_and_any_shape(ranks):
    (results,) = ranks.run(1, plain_usage)
    assert all(alike and error <= 1e-2 for alike, error in results)


def second_derivative():
    init_mesh((1, 1), "cpu")
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(ATPLinear(4, 4, COLUMN_FIRST)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_second_derivative_is_an_error(ranks):
    ranks.run(1, second_derivative)


def megatron_bytes():
    """On a rank of DeviceMesh(4, 1): bytes of the sums of an MLP's forward and backward."""
    mesh = init_mesh((4, 1), "cpu")
    up, down = ATPLinear(8, 32, COLUMN_FIRST), ATPLinear(32, 8, ROW_FIRST)
    x = torch.randn(6, 8, requires_grad=True)
    out = mlp(x, up, down)
    forward = mesh.x.traffic.read()["bytes"]
    out.sum().backward()
    return forward, mesh.x.traffic.read()["bytes"], mesh.y.traffic.read()["bytes"]


def test_a_mesh_of_one_row_communicates_as_megatron_does(ranks):
    """One all-reduce of the output in the forward and one of the input's gradient in the backward: its f and g."""
    one = 2 * 3 / 4 * 6 * 8 * 4
    assert ranks.run(4, megatron_bytes) == [(one, one, 0)] * 4


SAME = [Shard(0), Shard(0)]
MISTAKES = [
    (lambda: init_mesh((3, 1), "cpu"), "shape=(3, 1): does not divide the 2 rank(s) of the job; use d1·d2 = 2"),
    (lambda: ATPLinear(4, 3, COLUMN_FIRST), "out_features=3: not divisible by d1=2; use a multiple of it"),
    (lambda: ATPLinear(4, 4, SAME), f"shard_strategy={SAME}: use [Shard(1), Shard(0)] or [Shard(0), Shard(1)]"),
]


def make_mistakes():
    init_mesh((2, 1), "cpu")
    for make, message in MISTAKES:
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value) == message


def test_mistakes_are_reported_with_the_remedy(ranks):
    ranks.run(2, make_mistakes)
