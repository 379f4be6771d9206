"""Plans executed between real gloo ranks: bitwise correct, asynchronous, in both directions at once."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.stats import PeerLost
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import messages
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.plan import STRATEGIES, ReshardingPlan, gradient_plan, plan
from gpt4d.parallel.resharding.transfer import Link
from tests.parallel.resharding.cases import plan_between, reshardings

_DATA_STRATEGIES = STRATEGIES[:4]  # all but signal


def global_tensor(shape, dtype=torch.float64, salt: int = 0) -> torch.Tensor:
    """Return small integers, which every dtype holds exactly, with no two equal neighbors."""
    return ((torch.arange(math.prod(shape)) * 37 + salt) % 251).to(dtype).view(shape)


def local_tensor(tensor: torch.Tensor, mesh: StageMesh, layout: Layout, rank: int) -> torch.Tensor:
    tile = mesh.tiles(tuple(tensor.shape), layout)[rank]
    return tensor[tuple(slice(*r) for r in tile)].contiguous()


def source_tensor(resharding_plan: ReshardingPlan, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this rank sends; None on a receiver."""
    rank, mesh = dist.get_rank(), resharding_plan.source_mesh
    return local_tensor(tensor, mesh, resharding_plan.source, rank) if rank in mesh.devices else None


def expected_tensor(resharding_plan: ReshardingPlan, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this rank must receive; None on a sender."""
    rank, mesh = dist.get_rank(), resharding_plan.destination_mesh
    return local_tensor(tensor, mesh, resharding_plan.destination, rank) if rank in mesh.devices else None


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def new_link(name: str = "forward", **options) -> Link:
    return Link(name, dist.new_group(**options), torch.device("cpu"))


def strided(local: torch.Tensor | None) -> torch.Tensor | None:
    """Return the same values with no two of them adjacent in memory."""
    return None if local is None else torch.stack([local, local + 1], dim=-1)[..., 0]


def transfer_all(plans: list[ReshardingPlan], dtype: torch.dtype) -> list[bool]:
    """Execute all plans, each twice, at the same time on one link; wait in the opposite order."""
    link = new_link()
    prepared = [link.prepare(resharding_plan, dtype) for resharding_plan in plans] * 2
    tensors = [global_tensor(p.plan.shape, dtype, salt) for salt, p in enumerate(prepared)]
    transfers = [p.start(strided(source_tensor(p.plan, tensor))) for p, tensor in zip(prepared, tensors, strict=True)]
    received = [transfer.wait() for transfer in reversed(transfers)][::-1]
    link.close()
    cases = zip(received, prepared, tensors, strict=True)
    return [is_same(local, expected_tensor(p.plan, tensor)) for local, p, tensor in cases]


# Four strategies per example, each twice. A failing example is not shrunk, since each attempt takes seconds.
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(reshardings(max_devices=4), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_every_rank_gets_its_tile_bitwise_with_every_strategy(ranks, case, dtype):
    plans = [plan(*case, strategy=strategy) for strategy in _DATA_STRATEGIES]
    world_size = len(case[2].devices) + len(case[4].devices)
    assert all(all(correct) for correct in ranks.run(world_size, transfer_all, plans, dtype))


def transfer_in_small_chunks(plans: list[ReshardingPlan]) -> list[bool]:
    before, messages.MIN_CHUNK_BYTES["cpu"] = messages.MIN_CHUNK_BYTES["cpu"], 64
    try:
        return transfer_all(plans, torch.float32)
    finally:
        messages.MIN_CHUNK_BYTES["cpu"] = before


def test_chunks_pass_through_a_chain_of_hosts_while_others_arrive(ranks):
    """3 sources, 5 destinations on three hosts; tiles of hundreds of chunks, not contiguous on either side."""
    first, second = StageMesh.of_shape((3,)), StageMesh.of_shape((5,), 3, hosts=(7, 5, 7, 6, 5))
    plans = [
        plan((13, 9, 50), Layout((), ("0",), ()), first, Layout((), (), axes), second, strategy=strategy)
        for axes in ((), ("0",))
        for strategy in _DATA_STRATEGIES
    ]
    assert all(all(correct) for correct in ranks.run(8, transfer_in_small_chunks, plans))


def transfer_between_grids(stages: list[tuple[range, GridSizes]], layout: Layout, shape: tuple[int, ...]) -> bool:
    (first, second), rank = stages, dist.get_rank()
    stage_ranks, sizes = first if rank in first[0] else second
    local = global_tensor(shape)[Grid(sizes, ranks=stage_ranks).local_slices(shape, layout)]
    link = new_link()
    source_mesh, destination_mesh = (StageMesh.of_grid(*stage) for stage in stages)
    prepared = link.prepare(plan(shape, layout, source_mesh, layout, destination_mesh), local.dtype)
    received = prepared.start(local if rank in first[0] else None).wait()
    link.close()
    return received is None if rank in first[0] else is_same(received, local)


def test_a_tensor_moves_from_one_stages_grid_to_another(ranks):
    """The residual stream from z=2, x=2 on ranks 0 to 3 to data=2, y=2 on ranks 4 to 7."""
    stages = [(range(4), GridSizes(x=2, z=2)), (range(4, 8), GridSizes(y=2, data=2))]
    assert all(ranks.run(8, transfer_between_grids, stages, Layout(("data", "z"), (), ("y",)), (6, 3, 10)))


def reductions_of_a_new_link() -> list[tuple[str, int]]:
    """Return device type and number of elements of the all-reduces with which a link starts, and its counters."""
    reduced, original = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        reduced.append((tensor.device.type, tensor.numel()))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        link = new_link()
    finally:
        dist.all_reduce = original
    link.close()
    assert link.axis.traffic.read() == {"bytes": 0.0, "exposed_s": 0.0, "hidden_s": 0.0}
    return reduced


def test_a_link_starts_with_all_ranks_on_the_device_that_it_serves(ranks):
    """NCCL creates a communicator at its first use, which must have all ranks. A barrier of mixed groups uses gloo."""
    assert ranks.run(2, reductions_of_a_new_link) == [[("cpu", 1)]] * 2


def transfer_in_both_directions(plans: list[ReshardingPlan]) -> list[bool]:
    forward_link, backward_link = new_link("forward"), new_link("backward")
    correct = [c for resharding_plan in plans for c in both_directions(forward_link, backward_link, resharding_plan)]
    forward_link.close()
    backward_link.close()
    return correct


def both_directions(forward_link: Link, backward_link: Link, forward_plan: ReshardingPlan) -> list[bool]:
    """Each mesh waits for the tensor that it receives before it starts to send in the opposite direction."""
    forward = forward_link.prepare(forward_plan, torch.float32)
    backward = backward_link.prepare(gradient_plan(forward_plan), torch.float32)
    tensor, gradient = (global_tensor(forward_plan.shape, torch.float32, salt) for salt in (0, 5))
    correct = []
    if dist.get_rank() in forward_plan.source_mesh.devices:
        transfers = [forward.start(source_tensor(forward_plan, tensor)) for _ in range(3)]  # not yet received
        correct.append(is_same(backward.start().wait(), expected_tensor(backward.plan, gradient)))
        [transfer.wait() for transfer in transfers]
    else:
        backward.start(source_tensor(backward.plan, gradient)).wait()
        correct += [is_same(forward.start().wait(), expected_tensor(forward_plan, tensor)) for _ in range(3)]
    return correct


def test_forward_and_backward_do_not_block_each_other(ranks):
    plans = [plan_between((64, 1024), "S0R", (2, 1), "RS1", (2, 2), strategy=strategy) for strategy in _DATA_STRATEGIES]
    assert all(all(correct) and correct for correct in ranks.run(6, transfer_in_both_directions, plans))


def transfer_without_allocating(resharding_plan: ReshardingPlan) -> tuple[bool, float]:
    """Run prepared transfers while groups and tensors cannot be created; also return the bytes that the link counts."""
    link = new_link()
    prepared = link.prepare(resharding_plan, torch.bfloat16)
    tensor = global_tensor(resharding_plan.shape, torch.bfloat16)
    local, expected = source_tensor(resharding_plan, tensor), expected_tensor(resharding_plan, tensor)
    out = None if expected is None else torch.empty_like(expected)
    allocators = {(torch, "empty"): torch.empty, (torch, "zeros"): torch.zeros, (dist, "new_group"): dist.new_group}
    link.axis.traffic.read()
    try:
        for module, name in allocators:
            setattr(module, name, None)
        for _ in range(2):
            received = prepared.start(local, out).wait()
            assert received is None or received.data_ptr() == out.data_ptr()
    finally:
        for (module, name), allocator in allocators.items():
            setattr(module, name, allocator)
    link.close()
    traffic = link.axis.traffic.read()
    assert traffic["exposed_s"] + traffic["hidden_s"] > 0
    return is_same(out, expected), traffic["bytes"]


def test_prepared_transfers_allocate_nothing_and_count_their_bytes(ranks):
    resharding_plan = plan_between((2, 6, 10), "RS0R", (2, 1), "RRS0", (2, 2))  # tiles contiguous on neither side
    results = ranks.run(6, transfer_without_allocating, resharding_plan)
    assert all(correct for correct, _ in results)
    num_bytes = 2 * 2 * 6 * 10 * torch.bfloat16.itemsize  # half of the tensor to each of four devices, by chains
    assert [counted for _, counted in results] == [2 * num_bytes] * 6


def wait_for_lost_peer(resharding_plan: ReshardingPlan) -> str:
    link = new_link(timeout=timedelta(seconds=1))
    prepared = link.prepare(resharding_plan, torch.float32)
    if dist.get_rank() in resharding_plan.source_mesh.devices:
        return ""  # and never sends
    transfer, messages = prepared.start(), []
    for _ in range(2):  # each wait raises the error
        try:
            transfer.wait()
        except PeerLost as error:
            messages.append(str(error))
    return "; ".join(messages)


def test_wait_raises_peer_lost_if_the_source_never_sends(ranks):
    messages = ranks.run(2, wait_for_lost_peer, plan_between((4,), "R", (1,), "R", (1,)))[1]
    assert messages.count("reshard forward: ") == 2


def round_trips(cases: list[tuple[ReshardingPlan, tuple[str, ...]]]) -> list[torch.Tensor | None]:
    return [round_trip(forward_plan, partial) for forward_plan, partial in cases]


def round_trip(forward_plan: ReshardingPlan, partial: tuple[str, ...]) -> torch.Tensor | None:
    """Compute a loss on the destination mesh and send the gradient back. Return the gradient on a source device."""
    ranks = [*forward_plan.source_mesh.devices, *forward_plan.destination_mesh.devices]
    groups = [dist.new_group(ranks) for _ in range(2)]
    if dist.get_rank() not in ranks:
        return None
    forward_link, backward_link = (
        Link(name, group, torch.device("cpu")) for name, group in zip(("forward", "backward"), groups, strict=True)
    )
    forward = forward_link.prepare(forward_plan, torch.float64)
    backward = backward_link.prepare(gradient_plan(forward_plan, partial), torch.float64)
    x = forward.start(source_tensor(forward_plan, global_tensor(forward_plan.shape))).wait()
    if x is None:
        gradient = backward.start().wait()
    else:
        x, rank = x.requires_grad_(), dist.get_rank()
        factors = global_loss_factors(forward_plan, rank, partial)
        add_loss_gradient(x, local_tensor(factors, forward_plan.destination_mesh, forward_plan.destination, rank))
        gradient = backward.start(x.grad).wait()
    forward_link.close()
    backward_link.close()
    return gradient


def add_loss_gradient(x: torch.Tensor, factors: torch.Tensor) -> None:
    (factors * x.pow(2)).sum().backward()


def indices_along_partial(
    forward_plan: ReshardingPlan, rank: int, partial: tuple[str, ...]
) -> tuple[tuple[int, ...], bool]:
    """Return a device's indices along ``partial``, and True if it is the first replica with the same gradient."""
    place, indices = forward_plan.destination_mesh.devices.index(rank), {}
    for axis, size in reversed(forward_plan.destination_mesh.axes):
        place, indices[axis] = divmod(place, size)
    distinct_axes = {*partial, *forward_plan.destination.axes}
    is_first = all(index == 0 or axis in distinct_axes for axis, index in indices.items())
    return tuple(indices[axis] for axis in partial), is_first


def global_loss_factors(forward_plan: ReshardingPlan, rank: int, partial: tuple[str, ...]) -> torch.Tensor:
    """Return each element's factor in the loss: different along ``partial``, equal along the remaining axes."""
    indices, _ = indices_along_partial(forward_plan, rank, partial)
    return global_tensor(forward_plan.shape, salt=11 * sum((n + 1) * index for n, index in enumerate(indices)))


@pytest.mark.parametrize(("source", "destination"), [("RS0", "RR"), ("RR", "S2R"), ("RS10", "S2R")])
def test_gradients_equal_those_of_serial_autograd(ranks, source, destination):
    """The gradients of replicas are summed along ``partial``; along other axes all replicas hold the same one."""
    meshes = {(): (2, 1, 3), ("0",): (2, 1, 3), ("1",): (1, 2, 3), ("0", "1"): (2, 2, 1)}
    cases = [(plan_between((5, 6), source, (2, 1), destination, mesh), partial) for partial, mesh in meshes.items()]
    gradients = ranks.run(8, round_trips, cases)
    for number, (forward_plan, partial) in enumerate(cases):
        x = global_tensor(forward_plan.shape).requires_grad_()
        tiles = forward_plan.destination_mesh.tiles(forward_plan.shape, forward_plan.destination)
        for rank, tile in tiles.items():
            if indices_along_partial(forward_plan, rank, partial)[1]:
                slices = tuple(slice(*r) for r in tile)
                add_loss_gradient(x[slices], global_loss_factors(forward_plan, rank, partial)[slices])
        for rank in forward_plan.source_mesh.devices:
            expected = local_tensor(x.grad, forward_plan.source_mesh, forward_plan.source, rank)
            torch.testing.assert_close(gradients[rank][number], expected, rtol=1e-14, atol=0)
