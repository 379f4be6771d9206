"""Plans carried out between real gloo ranks: bitwise right, asynchronous, in both directions at once."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import program
from gpt4d.parallel.resharding.mesh import Mesh
from gpt4d.parallel.resharding.planning import STRATEGIES, Plan, plan, transposed
from gpt4d.parallel.resharding.transfer import Link
from gpt4d.parallel.traffic import PeerLost
from tests.parallel.resharding.cases import plan_between, reshardings

_REAL = STRATEGIES[:4]


def values(shape, dtype=torch.float64, salt: int = 0) -> torch.Tensor:
    """Of a global tensor: small whole numbers, which every dtype holds exactly, and no two neighbours alike."""
    return ((torch.arange(math.prod(shape)) * 37 + salt) % 251).to(dtype).view(shape)


def part(whole: torch.Tensor, mesh: Mesh, layout: Layout, rank: int) -> torch.Tensor:
    tile = mesh.tiles(tuple(whole.shape), layout)[rank]
    return whole[tuple(slice(*r) for r in tile)].contiguous()


def own_part(found: Plan, whole: torch.Tensor) -> torch.Tensor | None:
    """What this rank gives; None if it is one that receives."""
    rank = dist.get_rank()
    return part(whole, found.source_mesh, found.source, rank) if rank in found.source_mesh.devices else None


def expected(found: Plan, whole: torch.Tensor) -> torch.Tensor | None:
    rank = dist.get_rank()
    if rank not in found.destination_mesh.devices:
        return None
    return part(whole, found.destination_mesh, found.destination, rank)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def new_link(name: str = "forward", **options) -> Link:
    return Link(name, dist.new_group(**options), torch.device("cpu"))


def spread(local: torch.Tensor | None) -> torch.Tensor | None:
    """The same values, no two of them neighbours in memory."""
    return None if local is None else torch.stack([local, local + 1], dim=-1)[..., 0]


def several(plans: list[Plan], dtype: torch.dtype) -> list[bool]:
    """All plans under way at once on one link, each twice, waited for in the opposite order."""
    link = new_link()
    moves = [link.prepare(found, dtype) for found in plans] * 2
    wholes = [values(move.plan.shape, dtype, salt) for salt, move in enumerate(moves)]
    under_way = [move.start(spread(own_part(move.plan, whole))) for move, whole in zip(moves, wholes, strict=True)]
    received = [one.wait() for one in reversed(under_way)][::-1]
    link.close()
    return [same(got, expected(m.plan, whole)) for got, m, whole in zip(received, moves, wholes, strict=True)]


# Each with four strategies, twice. A failing example is not made smaller: each try would take seconds.
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(reshardings(most_devices=4), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_every_rank_gets_its_part_bitwise_with_every_strategy(ranks, case, dtype):
    plans = [plan(*case, strategy=strategy) for strategy in _REAL]
    world = len(case[2].devices) + len(case[4].devices)
    assert all(all(right) for right in ranks.run(world, several, plans, dtype))


def in_many_chunks(plans: list[Plan]) -> list[bool]:
    before, program.CHUNK_BYTES["cpu"] = program.CHUNK_BYTES["cpu"], 64
    try:
        return several(plans, torch.float32)
    finally:
        program.CHUNK_BYTES["cpu"] = before


def test_chunks_go_through_a_chain_of_hosts_while_others_come(ranks):
    """3 sources, 5 destinations on three hosts; tiles of hundreds of chunks' worth, scattered on both sides."""
    first, second = Mesh.of_shape((3,)), Mesh.of_shape((5,), 3, hosts=(7, 5, 7, 6, 5))
    plans = [
        plan((13, 9, 50), Layout((), ("0",), ()), first, Layout((), (), axes), second, strategy=strategy)
        for axes in ((), ("0",))
        for strategy in _REAL
    ]
    assert all(all(right) for right in ranks.run(8, in_many_chunks, plans))


def in_both_directions(plans: list[Plan]) -> list[bool]:
    there, back = new_link("forward"), new_link("backward")
    right = [right for found in plans for right in both_directions(there, back, found)]
    there.close()
    back.close()
    return right


def both_directions(there: Link, back: Link, forward: Plan) -> list[bool]:
    """Each mesh waits for what the other sends it before it starts its part of the other direction."""
    move = there.prepare(forward, torch.float32)
    gradient = back.prepare(transposed(forward), torch.float32)
    whole, other = values(forward.shape, torch.float32), values(forward.shape, torch.float32, 5)
    right = []
    if dist.get_rank() in forward.source_mesh.devices:
        under_way = [move.start(own_part(forward, whole)) for _ in range(3)]  # nobody takes them yet
        right.append(same(gradient.start().wait(), expected(gradient.plan, other)))
        [one.wait() for one in under_way]
    else:
        gradient.start(own_part(gradient.plan, other)).wait()
        right += [same(move.start().wait(), expected(forward, whole)) for _ in range(3)]
    return right


def test_forward_and_backward_do_not_block_each_other(ranks):
    plans = [plan_between((64, 1024), "S0R", (2, 1), "RS1", (2, 2), strategy=strategy) for strategy in _REAL]
    assert all(all(right) and right for right in ranks.run(6, in_both_directions, plans))


def without_making_anything(found: Plan) -> tuple[bool, float]:
    """Transfers once all is prepared, while groups and tensors cannot be made; and the bytes that this rank sent."""
    link = new_link()
    move = link.prepare(found, torch.bfloat16)
    whole = values(found.shape, torch.bfloat16)
    mine, goal = own_part(found, whole), expected(found, whole)
    out = None if goal is None else torch.empty_like(goal)
    makers = {(torch, "empty"): torch.empty, (torch, "zeros"): torch.zeros, (dist, "new_group"): dist.new_group}
    link.axis.traffic.read()
    try:
        for module, name in makers:
            setattr(module, name, None)
        for _ in range(2):
            got = move.start(mine, out).wait()
            assert got is None or got.data_ptr() == out.data_ptr()
    finally:
        for (module, name), made in makers.items():
            setattr(module, name, made)
    link.close()
    told = link.axis.traffic.read()
    assert told["exposed_s"] + told["hidden_s"] > 0
    return same(out, goal), told["bytes"]


def test_no_group_and_no_buffer_is_made_once_all_is_prepared_and_bytes_are_counted(ranks):
    found = plan_between((2, 6, 10), "RS0R", (2, 1), "RRS0", (2, 2))  # tiles scattered on both sides
    answers = ranks.run(6, without_making_anything, found)
    assert all(right for right, _ in answers)
    once = 2 * 2 * 6 * 10 * torch.bfloat16.itemsize  # to the two devices of each host, or half of it to each of the two
    assert sum(sent for _, sent in answers) == 2 * once
    assert [sent for _, sent in answers][3::2] == [0.0, 0.0]  # the last devices of the chains


def a_lost_peer(found: Plan) -> str:
    link = new_link(timeout=timedelta(seconds=1))
    move = link.prepare(found, torch.float32)
    if dist.get_rank() in found.source_mesh.devices:
        return ""  # and never sends
    transfer, said = move.start(), []
    for _ in range(2):  # whoever waits again is told again
        try:
            transfer.wait()
        except PeerLost as error:
            said.append(str(error))
    return "; ".join(said)


def test_a_transfer_whose_source_does_not_come_fails_where_it_is_waited_for(ranks):
    assert ranks.run(2, a_lost_peer, plan_between((4,), "R", (1,), "R", (1,)))[1].count("reshard forward: ") == 2


def round_trips(cases: list[tuple[Plan, tuple[str, ...]]]) -> list[torch.Tensor | None]:
    return [round_trip(forward, partial) for forward, partial in cases]


def round_trip(forward: Plan, partial: tuple[str, ...]) -> torch.Tensor | None:
    """On the destination mesh a loss of what was received, its gradient back; what a source device gets of it."""
    ranks = [*forward.source_mesh.devices, *forward.destination_mesh.devices]
    groups = [dist.new_group(ranks) for _ in range(2)]
    if dist.get_rank() not in ranks:
        return None
    there, back = (
        Link(name, group, torch.device("cpu")) for name, group in zip(("there", "back"), groups, strict=True)
    )
    move = there.prepare(forward, torch.float64)
    gradient = back.prepare(transposed(forward, partial), torch.float64)
    received = move.start(own_part(forward, values(forward.shape))).wait()
    if received is None:
        answer = gradient.start().wait()
    else:
        x, rank = received.requires_grad_(), dist.get_rank()
        loss(x, part(factors(forward, rank, partial), forward.destination_mesh, forward.destination, rank))
        answer = gradient.start(x.grad).wait()
    there.close()
    back.close()
    return answer


def loss(x: torch.Tensor, factors: torch.Tensor) -> None:
    (factors * x.pow(2)).sum().backward()


def along_partial(forward: Plan, rank: int, partial: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
    """Which of the replicas that add up a device is; and whether it is the first of those that hold the same."""
    place, indices = forward.destination_mesh.devices.index(rank), {}
    for axis, size in reversed(forward.destination_mesh.axes):
        place, indices[axis] = divmod(place, size)
    counted = all(i == 0 or axis in partial or axis in forward.destination.axes for axis, i in indices.items())
    return tuple(indices[axis] for axis in partial), counted


def factors(forward: Plan, rank: int, partial: tuple[str, ...]) -> torch.Tensor:
    """Of each element in the loss: others for each replica along ``partial``, the same along other axes."""
    which, _ = along_partial(forward, rank, partial)
    return values(forward.shape, salt=11 * sum((number + 1) * index for number, index in enumerate(which)))


@pytest.mark.parametrize(("source", "destination"), [("RS0", "RR"), ("RR", "S2R"), ("RS10", "S2R")])
def test_gradients_come_back_as_plain_autograd_gives_them(ranks, source, destination):
    """Replicas on the destination mesh: along ``partial`` their gradients add up, along others all hold the same."""
    meshes = {(): (2, 1, 3), ("0",): (2, 1, 3), ("1",): (1, 2, 3), ("0", "1"): (2, 2, 1)}
    cases = [(plan_between((5, 6), source, (2, 1), destination, mesh), partial) for partial, mesh in meshes.items()]
    answers = ranks.run(8, round_trips, cases)
    for number, (forward, partial) in enumerate(cases):
        x = values(forward.shape).requires_grad_()
        for rank, tile in forward.destination_mesh.tiles(forward.shape, forward.destination).items():
            if along_partial(forward, rank, partial)[1]:
                place = tuple(slice(*r) for r in tile)
                loss(x[place], factors(forward, rank, partial)[place])
        for rank in forward.source_mesh.devices:
            wanted = part(x.grad, forward.source_mesh, forward.source, rank)
            torch.testing.assert_close(answers[rank][number], wanted, rtol=1e-14, atol=0)
