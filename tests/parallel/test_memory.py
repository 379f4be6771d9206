"""The memory that layouts predict is the memory that tensors take."""

import pytest

from gpt4d import optim
from gpt4d.config import GridSizes, OptimConfig
from gpt4d.parallel import memory
from gpt4d.parallel.gradients import GradientSum
from gpt4d.parallel.grid import Grid
from tests.grids import grid_name
from tests.parallel.test_weights import OverlapConfig, batch, build


def predicted_and_taken(sizes, shard):
    grid = Grid(sizes)
    model = build(OverlapConfig(), grid=grid)
    total = GradientSum(model.weights, list(model.parameters()), shard=shard)
    optimizer = optim.build_optimizer(((str(i), p) for i, p in enumerate(total.owned)), OptimConfig())
    model.loss_sum(*batch(grid)).backward()
    model.weights.finish()
    states = [state[k] for state in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    taken = {
        "weights": sum(p.untyped_storage().nbytes() for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(s.untyped_storage().nbytes() for s in states),
    }
    return memory.by_layouts(model.parameters(), total.owned, grid), taken


@pytest.mark.parametrize("sizes", [GridSizes(2, 1, 2, 1), GridSizes(1, 2, 1, 4)], ids=grid_name)
@pytest.mark.parametrize("shard", [False, True])
def test_bytes_by_the_layouts_are_those_of_the_tensors(ranks, sizes, shard):
    for predicted, taken in ranks.run(sizes.devices, predicted_and_taken, sizes, shard):
        assert predicted == taken
