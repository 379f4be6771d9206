"""Plans executed between real gloo ranks: bitwise correct, asynchronous, in both directions at once."""

import itertools
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpt4d.parallel.comm.stats import PeerLost
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.plan import ReshardingPlan, gradient_plan, plan
from gpt4d.parallel.resharding.transfer import Link
from tests.support.reshardings import (
    global_tensor,
    is_same,
    local_tensor,
    new_link,
    plan_between,
    reshardings,
    sent_and_expected,
    transfer_all,
    transfer_in_small_chunks,
)


# A failing example is not shrunk, since each attempt takes seconds.
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(reshardings(max_devices=4), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_every_rank_gets_its_tile_bitwise(ranks, case, dtype):
    world_size = len(case[2].devices) + len(case[4].devices)
    assert all(all(correct) for correct in ranks.run(world_size, transfer_all, [plan(*case)], dtype))


def test_chunks_pass_through_a_chain_of_hosts_while_others_arrive(ranks):
    """3 sources, 5 destinations on three hosts; tiles of hundreds of chunks, not contiguous on either side."""
    first, second = StageMesh.of_shape((3,)), StageMesh.of_shape((5,), 3, hosts=(7, 5, 7, 6, 5))
    plans = [plan((13, 9, 50), Layout((), ("0",), ()), first, Layout((), (), axes), second) for axes in ((), ("0",))]
    assert all(all(correct) for correct in ranks.run(8, transfer_in_small_chunks, plans))


def reductions_of_a_new_link() -> list[tuple[str, int]]:
    """Return device type and number of elements of the all-reduces with which a link starts."""
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        link = new_link()
    link.close()
    assert link.axis.traffic.read() == {"bytes": 0.0, "exposed_s": 0.0, "hidden_s": 0.0}
    return [(call.args[0].device.type, call.args[0].numel()) for call in all_reduce.call_args_list]


def test_a_link_starts_with_all_ranks_on_the_device_that_it_serves(ranks):
    """NCCL creates a communicator at its first use, which must have all ranks. A barrier of mixed groups uses gloo."""
    assert ranks.run(2, reductions_of_a_new_link) == [[("cpu", 1)]] * 2


def transfer_in_both_directions(plans: list[ReshardingPlan]) -> list[bool]:
    """Each mesh waits for the tensor that it receives before it starts to send in the opposite direction."""
    links, correct = [new_link("forward"), new_link("backward")], []
    for forward_plan in plans:
        both = forward_plan, gradient_plan(forward_plan)
        forward, backward = (link.prepare(p, torch.float32) for link, p in zip(links, both, strict=True))
        tensors = (global_tensor(forward_plan.shape, torch.float32, salt) for salt in (0, 5))
        (sent, expected), (gradient, expected_gradient) = map(sent_and_expected, both, tensors)
        if dist.get_rank() in forward_plan.source_mesh.devices:
            transfers = [forward.start(sent) for _ in range(3)]  # not yet received
            correct.append(is_same(backward.start().wait(), expected_gradient))
            [transfer.wait() for transfer in transfers]
        else:
            backward.start(gradient).wait()
            correct += [is_same(forward.start().wait(), expected) for _ in range(3)]
    for link in links:
        link.close()
    return correct


def test_forward_and_backward_do_not_block_each_other(ranks):
    plans = [plan_between((64, 1024), "S0R", (2, 1), "RS1", (2, 2))]
    assert all(all(correct) and correct for correct in ranks.run(6, transfer_in_both_directions, plans))


def transfer_without_allocating(resharding_plan: ReshardingPlan) -> tuple[bool, float]:
    """Run prepared transfers while groups and tensors cannot be created; also return the bytes that the link counts."""
    link = new_link()
    prepared = link.prepare(resharding_plan, torch.bfloat16)
    local, expected = sent_and_expected(resharding_plan, global_tensor(resharding_plan.shape, torch.bfloat16))
    out = None if expected is None else torch.empty_like(expected)
    link.axis.traffic.read()
    with patch.multiple(torch, empty=None, zeros=None), patch.object(dist, "new_group", None):
        for _ in range(2):
            received = prepared.start(local, out).wait()
            assert received is None or received.data_ptr() == out.data_ptr()
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


def wait_for_lost_peer(resharding_plan: ReshardingPlan) -> list[str]:
    prepared, messages = new_link(timeout=timedelta(seconds=1)).prepare(resharding_plan, torch.float32), []
    if dist.get_rank() in resharding_plan.destination_mesh.devices:  # the source never sends
        transfer = prepared.start()
        for _ in range(2):  # each wait raises the error
            with pytest.raises(PeerLost) as error:
                transfer.wait()
            messages.append(str(error.value))
    return messages


def test_wait_raises_peer_lost_if_the_source_never_sends(ranks):
    _, (first, second) = ranks.run(2, wait_for_lost_peer, plan_between((4,), "R", (1,), "R", (1,)))
    assert first.startswith("reshard forward: ") and second.startswith("reshard forward: ")


def send_gradients(cases: list[tuple[ReshardingPlan, tuple[str, ...]]]) -> list[torch.Tensor | None]:
    """Return the gradients that this rank receives."""
    return [send_gradient(forward_plan, partial) for forward_plan, partial in cases]


def send_gradient(forward_plan: ReshardingPlan, partial: tuple[str, ...]) -> torch.Tensor | None:
    source, destination, rank = forward_plan.source_mesh, forward_plan.destination_mesh, dist.get_rank()
    members = [*source.devices, *destination.devices]
    group = dist.new_group(members)
    if rank not in members:
        return None
    gradient = None
    if rank in destination.devices:
        whole = global_gradient(forward_plan, index_along(destination, partial, rank))
        gradient = local_tensor(whole, destination, forward_plan.destination, rank)
    link = Link("backward", group, torch.device("cpu"))
    received = link.prepare(gradient_plan(forward_plan, partial), torch.float64).start(gradient).wait()
    link.close()
    return received


def index_along(mesh: StageMesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    index = np.unravel_index(mesh.devices.index(rank), [size for _, size in mesh.axes])
    return tuple(int(index[[*dict(mesh.axes)].index(axis)]) for axis in axes)


def global_gradient(forward_plan: ReshardingPlan, index: tuple[int, ...]) -> torch.Tensor:
    """Return the gradient on the replicas with an index: different along partial axes, equal along other axes."""
    return global_tensor(forward_plan.shape, salt=11 * sum((n + 1) * place for n, place in enumerate(index)))


@pytest.mark.parametrize(("source", "destination"), [("RS0", "RR"), ("RR", "S2R"), ("RS10", "S2R")])
def test_gradients_of_replicas_are_summed_along_partial_axes_only(ranks, source, destination):
    meshes = {(): (2, 1, 3), ("0",): (2, 1, 3), ("1",): (1, 2, 3), ("0", "1"): (2, 2, 1)}
    cases = [(plan_between((5, 6), source, (2, 1), destination, mesh), partial) for partial, mesh in meshes.items()]
    received = ranks.run(8, send_gradients, cases)
    for number, (forward_plan, partial) in enumerate(cases):
        sizes = (range(dict(forward_plan.destination_mesh.axes)[axis]) for axis in partial)
        whole = sum(global_gradient(forward_plan, index) for index in itertools.product(*sizes))
        for rank in forward_plan.source_mesh.devices:
            expected = local_tensor(whole, forward_plan.source_mesh, forward_plan.source, rank)
            assert torch.equal(received[rank][number], expected)
