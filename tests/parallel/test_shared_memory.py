"""Shared-memory collectives agree with gloo in any order of waits, and fail when a rank exits."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm import pending
from gpt4d.parallel.comm.cpu import shared_memory, two_level
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemoryTransport
from gpt4d.parallel.comm.cpu.two_level import TwoLevelTransport
from gpt4d.parallel.comm.pending import MAX
from gpt4d.parallel.grid import Grid
from tests.support.parallel_runs import axis_across_hosts, grid_on_hosts
from tests.support.rank_pool import RankFailure

LONG, SHORT = 1 << 18, 32  # bytes of a piece
PIECES = [("0011", LONG), ("0011", SHORT), ("0101", LONG), ("0110", SHORT), ("001122", SHORT), ("000111", LONG)]


def with_both(axis, start):
    """Return the results of started collectives with the transport of an axis, and with gloo."""
    both, own = [], axis.transport
    for transport in (own.gloo, own):
        axis.transport = transport
        pending = start()
        # Each rank waits in another order, the last first, so more collectives are in flight than there are slots.
        first = len(pending) // axis.size * axis.index
        for one in reversed(pending[first:] + pending[:first]):
            one.wait()
        both.append([one.wait() for one in pending])
    return both[::-1]


def compute_with_both(dtype):
    """Return the results through shared memory and through gloo, and the number of shared-memory collectives."""
    axis = Grid(GridSizes(x=3)).x
    through_memory = axis.transport
    assert isinstance(through_memory, SharedMemoryTransport)
    generator = torch.Generator().manual_seed(axis.index)
    tensors = [torch.randn(6, 5, generator=generator).to(dtype) for _ in range(9)]

    kinds = [
        lambda t: axis.start_all_reduce(t.clone()),
        lambda t: axis.start_all_reduce(t.clone(), MAX),
        lambda t: axis.start_all_gather(t),
        lambda t: axis.start_all_gather(t[:1]),
        lambda t: axis.start_reduce_scatter(t),
    ]
    return with_both(axis, lambda: [start(t) for start in kinds for t in tensors]), through_memory.memory.posted


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


def sums_where_one_group_has_hosts():
    """On eight ranks, of which six are on one host: x has a group inside it and one across the hosts."""
    grid = grid_on_hosts(GridSizes(4, 2, 1, 1), [0, 0, 0, 0, 0, 0, 1, 1])
    one = torch.ones(8)
    return type(grid.x.transport), [axis.all_reduce(one.clone())[0].item() for axis in (grid.x, grid.y)]


def test_groups_of_an_axis_may_be_inside_a_host_and_across_hosts(ranks):
    found = ranks.run(8, sums_where_one_group_has_hosts)
    assert [transport for transport, _ in found] == [SharedMemoryTransport] * 4 + [TwoLevelTransport] * 4
    assert all(sums == [4, 2] for _, sums in found)


def across_hosts(hosts, piece_bytes):
    """Return results by host and by gloo, and the number of elements that this rank sends to other hosts."""
    axis = axis_across_hosts(hosts)
    between_hosts, elements, generator = axis.transport.group, [], torch.Generator().manual_seed(dist.get_rank())
    exchange, gather = dist.all_to_all_single, two_level.all_gather

    def count_exchange(parts, full, group, **options):
        if group is between_hosts:
            elements.append(full.numel() * (1 - 1 / group.size()))
        return exchange(parts, full, group=group, **options)

    def count_gather(full, shard, **options):
        elements.append(full.numel() - shard.numel())
        return gather(full, shard, **options)

    def results(kind, *rows):
        tensors = [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in rows]
        return with_both(axis, lambda: [getattr(axis, kind)(t.clone()) for t in tensors])

    sizes = [len(hosts) * n for n in (1, 2, 5)]
    with (
        patch.object(pending, "PIECE_BYTES", piece_bytes),
        patch.object(dist, "all_to_all_single", count_exchange),
        patch.object(two_level, "all_gather", count_gather),
    ):
        summed = results("start_all_reduce", 2, 4, 5, 6, 8, 10, 12, 14, 16)
        return summed, results("start_reduce_scatter", *sizes), results("start_all_gather", *sizes), sum(elements)


@pytest.mark.parametrize(("hosts", "piece_bytes"), PIECES)
def test_collectives_across_hosts_are_right_and_send_each_element_over_a_link_once(ranks, hosts, piece_bytes):
    size, num_hosts = len(hosts), len(set(hosts))
    results = ranks.run(size, across_hosts, [*map(int, hosts)], piece_bytes)
    for summed, scattered, gathered, _ in results:
        torch.testing.assert_close(*summed, rtol=1e-14, atol=1e-15)
        assert all(torch.equal(one, first) for one, first in zip(summed[0], results[0][0][0], strict=True))
        torch.testing.assert_close(*scattered, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(*gathered, rtol=0, atol=0)
    total = sum(size * n * 3 for n in (1, 2, 5)) * size  # elements of all ranks' tensors, and of all gathered ones
    # A host sends its sums to each remote host once, and each shard enters each remote host once.
    sent = sum(elements for *_, elements in results)
    assert sent == total * (num_hosts - 1) / num_hosts / (size // num_hosts) + total * (num_hosts - 1)


def scatter_more_than_the_memory_holds():
    with patch.object(shared_memory, "SLOT_BYTES", 512), patch.object(pending, "PIECE_BYTES", 64):
        axis = axis_across_hosts([0, 0, 1, 1])
        full = torch.arange(4 * 100.0).view(4, 100)  # 1600 bytes, in pieces of 4 · 64
        scattered = axis.start_reduce_scatter(full.clone()).wait()
        gathered = axis.all_gather(scattered)
        total = axis.all_reduce(full.clone())
    assert torch.equal(gathered, 4 * full) and torch.equal(total, 4 * full)
    return axis.transport.before.posted, axis.transport.after.posted


def test_the_memory_of_a_host_has_room_for_pieces_of_long_tensors(ranks):
    assert ranks.run(4, scatter_more_than_the_memory_holds) == 4 * [(6 + 12, 6 + 12)]


def exit_of_rank_1(hosts):
    """On a rank: an all-reduce in which all ranks of the first host take part, but rank 1, for which they wait."""
    axis = grid_on_hosts(GridSizes(data=len(hosts)), hosts).data
    memories = vars(axis.transport).keys() & {"memory", "before", "after"}
    if dist.get_rank() == 1:
        for memory in memories:
            for peer in getattr(axis.transport, memory).peers.values():
                peer.close()
    elif hosts[dist.get_rank()] == 0:
        axis.all_reduce(torch.ones(4))


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_a_collective_raises_if_a_rank_of_the_host_exits(ranks, hosts):
    with pytest.raises(RankFailure, match="all_reduce data: the rank at index 1 of this host's group has exited"):
        ranks.run(len(hosts), exit_of_rank_1, hosts)
