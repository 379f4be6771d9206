"""The stream of weights against an engine that is not ours: FSDP2 shards the same layers over the same ranks."""

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from tests.support.grids import build_tiny_stage, full, tiny_batch
from tests.support.parallel_runs import runtime_of


def with_fsdp2(sizes, recompute):
    """Gradients of the same layers, sharded over x and y only, with FSDP2 over the ranks that were z."""
    grid = Grid(sizes._replace(z=1, data=sizes.z))
    model = build_tiny_stage(grid, recompute=recompute).module
    specs = {module: {n: p.spec for n, p in module.named_parameters(recurse=False)} for module in model.modules()}

    def describe(module, inputs):  # FSDP2 puts a parameter of its own in each place while the module computes
        for name, parameter in module.named_parameters(recurse=False):
            parameter.spec = specs[module][name]

    mesh = DeviceMesh.from_group(grid.data.group, "cpu")
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss_sum")
    model.set_gradient_divide_factor(1.0)  # our loss is a sum
    for module in model.modules():
        module.register_forward_pre_hook(describe)
    model.loss_sum(*tiny_batch(grid)).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def gradients_of_both(sizes, recompute):
    """On a rank: gradients of a step, whether z shards them, and the gradients with FSDP2."""
    stage = build_tiny_stage(Grid(sizes), recompute=recompute)
    runtime_of(stage).forward_backward([tiny_batch(stage.grid)], 1, 1.0)
    ours = {n: (p.grad, "z" in p.spec.layout.axes) for n, p in stage.module.named_parameters()}
    return ours, with_fsdp2(sizes, recompute)


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [((1, 1, 4, 1), False), ((2, 2, 2, 1), True), full((1, 1, 4, 1), True), full((2, 1, 2, 1), False)],
    ids=str,
)
def test_gradients_are_those_of_fsdp2_over_z(ranks, sizes, recompute):
    sizes = GridSizes(*sizes)
    found = ranks.run(sizes.devices, gradients_of_both, sizes, recompute)
    for rank, (ours, theirs) in enumerate(found):
        z = Grid.coordinates(rank, sizes)["z"]
        for name, (gradient, cut) in ours.items():
            expected = theirs[name].chunk(sizes.z)[z] if cut else theirs[name]
            assert (gradient - expected).norm() <= 1e-13 * expected.norm(), name
