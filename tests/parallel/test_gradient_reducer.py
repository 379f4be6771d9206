"""Gradients are summed over the batch axes early or late, in the same buckets and with the same bits."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.engine.reduction import default_bucket_bytes
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from tests.support.grids import build_tiny_stage, sampled, tiny_batch
from tests.support.parallel_runs import runtime_of
from tests.support.rank_pool import RankFailure

GRIDS = [GridSizes(*sizes) for sizes in ((1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 1, 4), (1, 2, 2, 2))]
MIB = 1 << 20


def two_steps(sizes, overlap):
    """Gradients of two steps of two microbatches, the buckets sent before each step's end, and their number."""
    grid = Grid(sizes)
    stage = build_tiny_stage(grid, dtype=torch.float32)
    runtime = runtime_of(stage, overlap=overlap, bucket_bytes=4000)
    finish, gradients, early = runtime.reducer.finish, [], []
    runtime.reducer.finish = lambda: early.append(len(runtime.reducer.sums.sent)) or finish()
    for _ in range(2):
        runtime.forward_backward([tiny_batch(grid, microbatch) for microbatch in range(2)], 2, 1.0)
        gradients += [p.grad.clone() for p in stage.module.parameters()]
        stage.module.zero_grad(set_to_none=True)
    return gradients, early, len(runtime.reducer.sums.buckets)


@pytest.mark.parametrize("sizes", sampled(GRIDS, GRIDS[:2]))
def test_buckets_leave_during_the_backward_and_sum_to_the_same_bits(ranks, sizes):
    at_the_end = ranks.run(sizes.devices, two_steps, sizes, False)
    behind_it = ranks.run(sizes.devices, two_steps, sizes, True)
    for (expected, _, _), (gradients, early, buckets) in zip(at_the_end, behind_it, strict=True):
        # Over z, the last scatters are still in flight when the backward of so small a model ends.
        assert early[0] == early[1] >= (1 if sizes.z > 1 else buckets // 2) and buckets > 4
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("gradients", "data", "shard_states", "bucket"),
    [
        (8, 1024, True, 1),
        (640, 1024, True, 20),  # 1/32 of the gradients
        (8192, 8, True, 32),
        (8192, 128, True, 128),  # 1 MiB per rank of data
        (8192, 1024, True, 256),
        (8192, 1024, False, 32),
    ],
)
def test_buckets_of_sharded_states_grow_with_the_ranks_of_data(gradients, data, shard_states, bucket):
    assert default_bucket_bytes(gradients * MIB, GridSizes(data=data), shard_states) == bucket * MIB


def more_terms_than_expected():
    grid = Grid(GridSizes(1, 1, 1, 2))
    stage = build_tiny_stage(grid)
    reducer = runtime_of(stage, bucket_bytes=1).reducer
    reducer.begin(stage.contributions)
    for microbatch in range(2):
        stage.module.loss_sum(*tiny_batch(grid, microbatch)).backward()
    reducer.finish()


def test_a_term_that_the_description_does_not_have_is_an_error(ranks):
    with pytest.raises(RankFailure, match="has more contributions than its description says"):
        ranks.run(2, more_terms_than_expected)


def rows_of_the_sum(sizes):
    """Per parameter: the sum of the gradients, this rank's rows of it, the slices of the global tensor these are."""
    sums = []
    for shard in (False, True):
        grid = Grid(sizes)
        stage = build_tiny_stage(grid)
        runtime = runtime_of(stage, bucket_bytes=4000, shard=shard)
        shards = runtime.reducer.optimizer_shards
        runtime.forward_backward([tiny_batch(grid)], 1, 1.0)
        sums.append([(p.grad, grid.local_slices(p.spec.shape, p.spec.layout)) for p in shards])
    parameters = stage.module.parameters()
    weights = [(p, own) for p, own in zip(parameters, shards, strict=True) if "z" in p.spec.layout.axes]
    return sums, [len(own) / len(p) for p, own in weights]


@pytest.mark.parametrize("sizes", sampled(GRIDS, GRIDS[:1]))
def test_with_sharded_states_each_rank_of_data_has_its_rows(ranks, sizes):
    for (wholes, parts), shares in ranks.run(sizes.devices, rows_of_the_sum, sizes):
        for (whole, place), (part, own_place) in zip(wholes, parts, strict=True):
            mine = tuple(slice(o.start - p.start, o.stop - p.start) for o, p in zip(own_place, place, strict=True))
            torch.testing.assert_close(part, whole[mine], rtol=1e-12, atol=0)
        assert shares and set(shares) == {1 / sizes.data}


def triple_own_rows(sizes, precision):
    """On a rank: whether all rows (in the compute dtype) and own rows are tripled; bytes sent, and of rows."""
    grid = Grid(sizes)
    stage = build_tiny_stage(grid, dtype=torch.float32, precision=precision)
    parameters = dict(stage.module.named_parameters())
    reducer = GradientReducer(stage.weights, parameters, bucket_bytes=4000, shard=True)
    before, own_before = ([p.detach().clone() for p in ps] for ps in (parameters.values(), reducer.optimizer_shards))
    with torch.no_grad():
        for shard in reducer.optimizer_shards:
            shard.mul_(3)
    grid.data.traffic.read()
    reducer.start_param_all_gather()
    reducer.wait_params()
    dtype = stage.weights.context.compute_dtype
    used = [torch.equal(p.to(dtype), (3 * b).to(dtype)) for p, b in zip(parameters.values(), before, strict=True)]
    exact = [torch.equal(p, 3 * b) for p, b in zip(reducer.optimizer_shards, own_before, strict=True)]
    rows = sum(p.numel() for p in reducer.optimizer_shards if "data" in p.spec.layout.axes) * dtype.itemsize
    return all(used), all(exact), grid.data.traffic.read()["bytes"], rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_that_one_rank_updated_reach_all_others_in_the_compute_dtype(ranks, precision):
    for used, exact, sent, rows in ranks.run(4, triple_own_rows, GridSizes(1, 2, 1, 2), precision):
        assert used and exact
        assert sent == rows > 0  # to one other rank of data
