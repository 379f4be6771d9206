"""Shared-memory collectives agree with gloo in any order of waits, and fail when a rank exits."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm import collectives, message_size
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.cpu import hosts as hosts_module
from gpt4d.parallel.comm.cpu import shared_memory, two_level
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemoryTransport
from gpt4d.parallel.comm.cpu.two_level import TwoLevelTransport
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.symbolic.kernels import MAX
from tests.support.rank_pool import RankFailure


def compute_with_both(dtype):
    """Return the results through shared memory and through gloo, and the number of shared-memory collectives."""
    grid = Grid(GridSizes(x=3))
    through_memory = grid.x.transport
    assert isinstance(through_memory, SharedMemoryTransport)
    generator = torch.Generator().manual_seed(grid.x.index)
    tensors = [torch.randn(6, 5, generator=generator).to(dtype) for _ in range(9)]
    both = []
    for grid.x.transport in (through_memory, through_memory.gloo):
        results = [
            [collectives.start_all_reduce(t.clone(), grid.x) for t in tensors],
            [collectives.start_all_reduce(t.clone(), grid.x, MAX) for t in tensors],
            [collectives.start_all_gather(t, grid.x) for t in tensors],
            [collectives.start_all_gather(t[:1], grid.x) for t in tensors],
            [collectives.start_reduce_scatter(t, grid.x) for t in tensors],
        ]
        # Each rank waits in another order, the last first, so more collectives are in flight than there are slots.
        for kind in results[grid.x.index :] + results[: grid.x.index]:
            for pending in reversed(kind):
                pending.wait()
        both.append([pending.wait() for kind in results for pending in kind])
    return both, through_memory.memory.posted


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
        for peer in grid.x.transport.memory.peers.values():
            peer.close()
        return
    grid.x.all_reduce(torch.ones(4))


def test_ranks_that_wait_for_a_rank_that_exited_raise(ranks):
    with pytest.raises(RankFailure, match="the rank at index 1 of this host's group has exited"):
        ranks.run(3, exit_of_one_rank)


def gather_repeatedly():
    grid = Grid(GridSizes(x=2))
    first = grid.x.all_gather(torch.full((1, 3), grid.x.index + 1.0))
    for _ in range(10):
        grid.x.all_gather(torch.zeros(1, 3))
    return first


def test_a_result_is_not_overwritten_by_later_collectives(ranks):
    for result in ranks.run(2, gather_repeatedly):
        assert result.tolist() == [[1.0] * 3, [2.0] * 3]


def grid_on_hosts(sizes: GridSizes, hosts: list[int]) -> Grid:
    """Return a grid as if each rank were on the host that the list names."""
    listen = hosts_module.listen

    def listen_on_fake_host(backlog):
        listener, (host, address) = listen(backlog)
        return listener, [f"{host} {hosts[dist.get_rank()]}", address]

    hosts_module.listen = listen_on_fake_host
    try:
        return Grid(sizes)
    finally:
        hosts_module.listen = listen


def axis_across_hosts(hosts: list[int]) -> Axis:
    """Return the axis of all ranks as if each rank were on the host that the list names."""
    axis = grid_on_hosts(GridSizes(data=len(hosts)), hosts).data
    assert isinstance(axis.transport, TwoLevelTransport) and axis.transport.size == len(set(hosts))
    return axis


def sums_where_one_group_has_hosts():
    """On eight ranks, of which six are on one host: x has a group inside it and one across the hosts."""
    grid = grid_on_hosts(GridSizes(4, 2, 1, 1), [0, 0, 0, 0, 0, 0, 1, 1])
    one = torch.ones(8)
    return type(grid.x.transport), [axis.all_reduce(one.clone())[0].item() for axis in (grid.x, grid.y)]


def test_groups_of_an_axis_may_be_inside_a_host_and_across_hosts(ranks):
    found = ranks.run(8, sums_where_one_group_has_hosts)
    assert [transport for transport, _ in found] == [SharedMemoryTransport] * 4 + [TwoLevelTransport] * 4
    assert all(sums == [4, 2] for _, sums in found)


def reduce_across_hosts(hosts, piece_bytes):
    """Return sums on an axis across hosts, and the same sums by gloo."""
    axis, rank = axis_across_hosts(hosts), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (2, 4, 5, 6, 8, 10, 12, 14, 16)]
    with patch.object(message_size, "PIECE_BYTES", piece_bytes):
        pending = [collectives.start_all_reduce(t.clone(), axis) for t in tensors]
    sums = [p.wait() for p in pending]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return sums, tensors


@pytest.mark.parametrize("piece_bytes", [64, 1 << 18], ids=["several pieces", "one piece"])
def test_an_all_reduce_across_hosts_is_right_and_bit_equal_on_all_ranks(ranks, piece_bytes):
    results = ranks.run(4, reduce_across_hosts, [0, 0, 1, 1], piece_bytes)
    for sums, expected in results:
        for one, other, first in zip(sums, expected, results[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)
            assert torch.equal(one, first)


def scatter_and_gather_across_hosts(hosts, piece_bytes):
    """Check results across hosts against gloo's; return the number of elements that this rank sends to other hosts."""
    axis, rank = axis_across_hosts(hosts), dist.get_rank()
    generator, elements = torch.Generator().manual_seed(rank), []
    exchange, gather = dist.all_to_all_single, two_level.all_gather

    def count_exchange(parts, full, **options):
        elements.append(full.numel() * (1 - 1 / dist.get_world_size(options["group"])))
        return exchange(parts, full, **options)

    def count_gather(full, shard, **options):
        elements.append(full.numel() - shard.numel())
        return gather(full, shard, **options)

    size = len(hosts)
    tensors = [torch.randn(size * n, 3, dtype=torch.float64, generator=generator) for n in (1, 2, 5)]
    with (
        patch.object(message_size, "PIECE_BYTES", piece_bytes),
        patch.object(dist, "all_to_all_single", count_exchange),
        patch.object(two_level, "all_gather", count_gather),
    ):
        scattered = [collectives.start_reduce_scatter(t.clone(), axis) for t in tensors]
        gathered = [collectives.start_all_gather(t, axis) for t in tensors]
        ours = [pending.wait() for pending in (*scattered, *gathered)]
    expected = []
    for tensor in tensors:
        whole = tensor.clone()
        dist.all_reduce(whole)
        expected.append(whole.chunk(size)[rank])
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        expected.append(torch.cat(parts))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    return sum(elements)


@pytest.mark.parametrize(
    "hosts, piece_bytes",
    [
        ([0, 0, 1, 1], 1 << 18),
        ([0, 0, 1, 1], 32),
        ([0, 1, 0, 1], 1 << 18),
        ([0, 1, 1, 0], 32),
        ([0, 0, 1, 1, 2, 2], 32),
        ([0, 0, 0, 1, 1, 1], 1 << 18),
    ],
    ids=str,
)
def test_scatters_and_gathers_across_hosts_send_each_element_over_a_link_once(ranks, hosts, piece_bytes):
    size, num_hosts = len(hosts), len(set(hosts))
    scattered = sum(size * n * 3 for n in (1, 2, 5)) * size  # elements of all ranks' tensors, and of all gathered ones
    sent = sum(ranks.run(size, scatter_and_gather_across_hosts, hosts, piece_bytes))
    local = size // num_hosts
    # A host sends its sums to each remote host once, and each shard enters each remote host once.
    assert sent == scattered * (num_hosts - 1) / num_hosts / local + scattered * (num_hosts - 1)


def scatter_more_than_the_memory_holds():
    with patch.object(shared_memory, "SLOT_BYTES", 512), patch.object(message_size, "PIECE_BYTES", 64):
        axis = axis_across_hosts([0, 0, 1, 1])
        full = torch.arange(4 * 100.0).view(4, 100)  # 1600 bytes, in pieces of 4 · 64
        scattered = collectives.start_reduce_scatter(full.clone(), axis).wait()
        gathered = axis.all_gather(scattered)
        total = axis.all_reduce(full.clone())
    assert torch.equal(gathered, 4 * full) and torch.equal(total, 4 * full)
    return axis.transport.before.posted, axis.transport.after.posted


def test_the_memory_of_a_host_has_room_for_pieces_of_long_tensors(ranks):
    assert ranks.run(4, scatter_more_than_the_memory_holds) == 4 * [(6 + 12, 6 + 12)]


def exit_of_one_host():
    axis = axis_across_hosts([0, 0, 1, 1])
    if dist.get_rank() == 1:
        for peer in (*axis.transport.before.peers.values(), *axis.transport.after.peers.values()):
            peer.close()
        return
    if dist.get_rank() == 0:
        axis.all_reduce(torch.ones(4))


def test_a_collective_by_hosts_raises_if_a_rank_of_the_host_exits(ranks):
    with pytest.raises(RankFailure, match="all_reduce data: the rank at index 1 of this host's group has exited"):
        ranks.run(4, exit_of_one_host)
