"""Gradients are summed over the batch's axes early or late, in the same buckets and with the same bits."""

import pytest
import torch

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.parallel import gradients
from gpt4d.parallel.grid import Grid
from tests.grids import grid_name
from tests.parallel.test_weights import Detour, batch, build


def steps(sizes, overlap):
    """Gradients of three steps of two microbatches, and how many buckets set off before each step's end."""
    model = build(OverlapConfig(), dtype=torch.float32, grid=Grid(sizes))
    total = gradients.GradientReducer(model.weights, list(model.parameters()), overlap, bucket_bytes=4000)
    found, early = [], []
    for _ in range(3):
        for microbatch in range(2):
            model.loss_sum(*batch(model.weights.grid, microbatch)).backward()
        early.append(len(total._sent))
        total.finish()
        found += [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
    return found, early, len(total.buckets)


@pytest.mark.parametrize("sizes", [GridSizes(1, 1, 1, 4), GridSizes(1, 1, 2, 2), GridSizes(2, 1, 1, 2)], ids=grid_name)
def test_buckets_set_off_during_the_backward_and_sum_to_the_same_bits(ranks, sizes):
    at_the_end = ranks.run(sizes.devices, steps, sizes, False)
    behind_it = ranks.run(sizes.devices, steps, sizes, True)
    for (late, _, _), (found, early, buckets) in zip(at_the_end, behind_it, strict=True):
        # Over z, the last scatters are still under way when the backward of so small a model ends.
        assert early[0] == 0 and early[1] == early[2] >= (1 if sizes.z > 1 else buckets // 2) and buckets > 4
        assert all(torch.equal(a, b) for a, b in zip(found, late, strict=True))


def detours(overlap):
    from gpt4d.model.init import initialize
    from gpt4d.parallel.weights import WeightStream
    from tests.grids import TINY_MODEL

    weights = WeightStream(Grid(GridSizes(1, 1, 1, 4)), torch.float64, torch.float64)
    model = Detour(TINY_MODEL, weights)
    initialize(model, 1, weights.grid)
    total = gradients.GradientReducer(weights, list(model.parameters()), overlap, bucket_bytes=1)
    found = []
    for step in range(6):
        model.turn = (2, 1)[step % 2]  # its next is 3, once through the blocks, or 2, three times
        model.loss_sum(*batch(weights.grid, step)).backward()
        total.finish()
        found += [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
    return found


def test_a_contribution_after_its_bucket_has_left_is_not_lost(ranks):
    """Blocks used once in a step and three times in the next: the second step's buckets set off too early."""
    early, late = (ranks.run(4, detours, overlap)[0] for overlap in (True, False))
    for one, other in zip(early, late, strict=True):
        assert (one - other).norm() <= 1e-13 * other.norm()


def rows_of_the_sum(sizes):
    """Per parameter: the sum of the gradients, this rank's rows of it, the slices of the global tensor these are."""
    found = []
    for shard in (False, True):
        grid = Grid(sizes)
        model = build(OverlapConfig(), grid=grid)
        total = gradients.GradientReducer(model.weights, list(model.parameters()), bucket_bytes=4000, shard=shard)
        for step in range(2):
            model.loss_sum(*batch(grid, step)).backward()
            total.finish()
            found.append([(p.grad, grid.local_slices(p.spec.shape, p.spec.layout)) for p in total.owned])
            model.zero_grad(set_to_none=True)
    weights = [(p, own) for p, own in zip(model.parameters(), total.owned, strict=True) if "z" in p.spec.layout.axes]
    return [found[1], found[3]], [len(own) / len(p) for p, own in weights]


@pytest.mark.parametrize("sizes", [GridSizes(1, 1, 1, 4), GridSizes(1, 2, 2, 2)], ids=grid_name)
def test_with_sharded_states_each_rank_of_data_has_its_rows_of_the_sum(ranks, sizes):
    for (wholes, parts), shares in ranks.run(sizes.devices, rows_of_the_sum, sizes):
        for (whole, place), (part, own_place) in zip(wholes, parts, strict=True):
            mine = tuple(slice(o.start - p.start, o.stop - p.start) for o, p in zip(own_place, place, strict=True))
            torch.testing.assert_close(part, whole[mine], rtol=1e-12, atol=0)
        assert shares and set(shares) == {1 / sizes.data}


def spread(sizes):
    model = build(OverlapConfig(), grid=Grid(sizes))
    total = gradients.GradientReducer(model.weights, list(model.parameters()), bucket_bytes=4000, shard=True)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for owned in total.owned:
            owned.mul_(3)
    total.spread()
    total.arrive()
    return [torch.equal(p, 3 * b) for p, b in zip(model.parameters(), before, strict=True)]


def test_what_every_rank_updated_reaches_all_others(ranks):
    assert all(all(equal) for equal in ranks.run(4, spread, GridSizes(1, 2, 1, 2)))
