"""Shared-memory collectives agree with gloo in any order of waits, and fail when a rank exits."""

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Grid
from tests.rank_pool import RankFailure


def compute_with_both(dtype):
    """Return the results through shared memory and through gloo, and the number of shared-memory collectives."""
    grid = Grid(GridSizes(x=3))
    memory = grid.x.shm
    assert memory is not None, "ranks of one host have no shared memory"
    generator = torch.Generator().manual_seed(grid.x.index)
    tensors = [torch.randn(6, 5, generator=generator).to(dtype) for _ in range(9)]
    both = []
    for grid.x.shm in (memory, None):
        results = [
            [collectives.start_all_reduce(t.clone(), grid.x) for t in tensors],
            [collectives.start_all_reduce(t.clone(), grid.x, dist.ReduceOp.MAX) for t in tensors],
            [collectives.start_all_gather(t, grid.x) for t in tensors],
            [collectives.start_all_gather(t[:1], grid.x) for t in tensors],
            [collectives.start_reduce_scatter(t, grid.x) for t in tensors],
        ]
        # Each rank waits in another order, the last first, so more collectives are in flight than there are slots.
        for kind in results[grid.x.index :] + results[: grid.x.index]:
            for pending in reversed(kind):
                pending.wait()
        both.append([pending.wait() for kind in results for pending in kind])
    return both, memory.posted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_agree_with_gloo_and_sums_are_bit_equal_on_all_ranks(ranks, dtype):
    results = ranks.run(3, compute_with_both, dtype)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for (through_memory, through_sockets), posted in results:
        assert posted == 45
        for one, other in zip(through_memory, through_sockets, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for mine, first in zip(through_memory[:18], results[0][0][0][:18], strict=True):
            assert torch.equal(mine, first)


def exit_of_one_rank():
    grid = Grid(GridSizes(x=3))
    if grid.x.index == 1:
        for peer in grid.x.shm.peers.values():
            peer.close()
        return
    collectives.all_reduce(torch.ones(4), grid.x)


def test_ranks_that_wait_for_a_rank_that_exited_raise(ranks):
    with pytest.raises(RankFailure, match="the rank at index 1 of this host's group has exited"):
        ranks.run(3, exit_of_one_rank)


def gather_repeatedly():
    grid = Grid(GridSizes(x=2))
    first = collectives.all_gather(torch.full((1, 3), grid.x.index + 1.0), grid.x)
    for _ in range(10):
        collectives.all_gather(torch.zeros(1, 3), grid.x)
    return first


def test_a_result_is_not_overwritten_by_later_collectives(ranks):
    for result in ranks.run(2, gather_repeatedly):
        assert result.tolist() == [[1.0] * 3, [2.0] * 3]


def reduce_across_two_hosts():
    """On a rank: all-reduce on an axis of four ranks as if each two of them were on one host."""
    from gpt4d.parallel import shared_memory

    listen, rank = shared_memory._listen, dist.get_rank()

    def listen_on_fake_host(backlog):
        listener, (host, address) = listen(backlog)
        return listener, ((*host, rank // 2), address)

    shared_memory._listen = listen_on_fake_host
    try:
        grid = Grid(GridSizes(data=4))
    finally:
        shared_memory._listen = listen
    assert grid.data.shm.size == 2 and dist.get_world_size(grid.data.inter_host_group) == 2
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (2, 4, 5, 6, 8, 10, 12, 14, 16)]
    pending = [collectives.start_all_reduce(t.clone(), grid.data) for t in tensors]
    sums = [p.wait() for p in pending]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return sums, tensors


def test_an_all_reduce_across_hosts_is_right_and_bit_equal_on_all_ranks(ranks):
    results = ranks.run(4, reduce_across_two_hosts)
    for sums, expected in results:
        for one, other, first in zip(sums, expected, results[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)
            assert torch.equal(one, first)
