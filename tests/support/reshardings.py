"""Cases of reshardings, the paper's Table 2 and random layouts on random meshes, and the execution of their plans."""

import itertools
import math
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh, parse
from gpt4d.parallel.resharding.plan import MIN_CHUNK_BYTES, PeerMessage, ReshardingPlan, Round, plan, rank_program
from gpt4d.parallel.resharding.transfer import Link

# The paper's Table 2: layouts and meshes, then the number of unit tasks and the makespans of the naive and of the best
# order, which follow from the paper's text.
TABLE_2 = {
    1: ("S0RR", (2, 4), "S0RR", (2, 4), 2, 1 / 2, 1 / 2),
    2: ("RRR", (2, 4), "S0RR", (2, 4), 2, 1, 1 / 2),
    3: ("RS0R", (2, 4), "S0RR", (2, 4), 4, 3 / 4, 1 / 2),
    4: ("RS01R", (2, 4), "S01RR", (2, 4), 64, 15 / 16, 1 / 2),
    5: ("S1RR", (2, 4), "S0RR", (2, 4), 4, 1, 1 / 2),
    6: ("S0RR", (2, 4), "S0RR", (3, 4), 4, 1, 1 / 2),
    7: ("S1RR", (1, 4), "RRR", (2, 4), 4, 1, 1),
    8: ("RRR", (2, 3), "RRR", (3, 2), 1, 1, 1),
    9: ("RS0R", (2, 4), "RRS0", (2, 4), 4, 3 / 4, 1 / 2),
}


def plan_table_2(case: int, **options):
    source, source_shape, destination, destination_shape, *_ = TABLE_2[case]
    shape = (3072, 1024, 170) if case == 6 else (1024, 1024, 512)
    return plan_between(shape, source, source_shape, destination, destination_shape, **options)


def plan_between(shape, source: str, source_shape, destination: str, destination_shape, make=plan, **options):
    """Return a plan between meshes that share no host; the first axis of a mesh enumerates its hosts."""
    first = StageMesh.of_shape(source_shape)
    second = StageMesh.of_shape(destination_shape, len(first.devices), source_shape[0])
    return make(shape, parse("src", source), first, parse("dst", destination), second, **options)


def host_by_device(*meshes: StageMesh) -> dict[int, int]:
    return {device: host for mesh in meshes for device, host in zip(mesh.devices, mesh.hosts, strict=True)}


@st.composite
def reshardings(draw, max_devices: int = 16, max_dims: int = 3):
    """Arguments of ``plan``: uneven and empty tiles, replicas, devices on any host, hosts shared by both meshes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_dims)))
    meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= max_devices)
    sizes = draw(meshes), draw(meshes)
    first = draw(placed_meshes(sizes[0], 0))
    second = draw(placed_meshes(sizes[1], len(first.devices)))
    return shape, draw(layouts(first, len(shape))), first, draw(layouts(second, len(shape))), second


@st.composite
def placed_meshes(draw, shape: list[int], first_device: int):
    count = math.prod(shape)
    hosts = draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple))
    return StageMesh.of_shape(tuple(shape), first_device, first_device, hosts)


@st.composite
def layouts(draw, mesh: StageMesh, dims: int):
    axes_by_dim = [[] for _ in range(dims)]
    for axis, _ in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            axes_by_dim[dim].append(axis)
    return Layout(*map(tuple, axes_by_dim))


def check_plan(resharding_plan: ReshardingPlan) -> None:
    """Fail unless all receivers get each tile, links have one send at a time, and a host's devices are adjacent."""
    host_of = host_by_device(resharding_plan.destination_mesh)
    sends, tasks = resharding_plan.sends, resharding_plan.tasks
    assert resharding_plan.lower_bound <= resharding_plan.makespan == max(send.stop for send in sends)
    assert [send.start for send in sends] == sorted(send.start for send in sends)
    received = {number: [] for number in range(len(tasks))}
    for send in sends:
        assert send.sender in tasks[send.task].senders
        received[send.task] += send.receivers
        hosts = [host for host, _ in itertools.groupby(host_of[device] for device in send.receivers)]
        assert tuple(hosts) == send.receiver_hosts and len(set(hosts)) == len(hosts)
    for task, devices in zip(tasks, received.values(), strict=True):
        assert sorted(devices) == sorted(task.receivers)
    between_hosts = [send for send in sends if send.stop > send.start]
    for one, other in itertools.combinations(between_hosts, 2):
        if one.sender_host == other.sender_host or set(one.receiver_hosts) & set(other.receiver_hosts):
            assert one.stop <= other.start or other.stop <= one.start


ELEMENT_BYTES = 128 * 1024  # elements so large that each is a chunk


class SimulatedRank:
    """A rank that, as with NCCL, ends a round of its program only when the peers of all its messages have joined."""

    def __init__(self, resharding_plan, rank, tensor, program_of):
        self.program = program_of(resharding_plan, rank, ELEMENT_BYTES)
        self.local = np.full(self.program.shape, -1)
        if not self.program.receives:
            tile = resharding_plan.source_mesh.tiles(resharding_plan.shape, resharding_plan.source)[rank]
            self.local = tensor[tuple(slice(*r) for r in tile)].copy()
        self.rounds = self.messages_of_rounds()
        self.next_round()

    def next_round(self):
        """Go to the next round: ``pending`` holds its messages, None at the end."""
        self.pending = next(self.rounds, None)

    def messages_of_rounds(self):
        for step in self.program.steps:
            view = self.local[step.slices]
            self.tile = view.reshape(-1).copy() if step.sending else np.full(view.size, -1)
            for round_ in rounds_with_signals(step):
                yield {("to", m) for m in round_.sends} | {("from", m) for m in round_.receives}
            if not step.sending:
                self.local[step.slices] = self.tile.reshape(step.shape)


def rounds_with_signals(step):
    """Return a step's rounds between the empty messages with which senders pass the link."""
    signals = [() if rank is None else (PeerMessage(rank, 0, 0),) for rank in (step.previous_sender, step.next_sender)]
    rounds = [Round((), signals[0]), *step.rounds, Round(signals[1], ())]
    return [round_ for round_ in rounds if round_.sends or round_.receives]


def execute(resharding_plan, tensor, program_of=rank_program) -> dict[int, SimulatedRank]:
    """Run all ranks to the end; fail if no rank can continue."""
    source_mesh, destination_mesh = resharding_plan.source_mesh, resharding_plan.destination_mesh
    devices = (*source_mesh.devices, *destination_mesh.devices)
    ranks = {rank: SimulatedRank(resharding_plan, rank, tensor, program_of) for rank in devices}
    host = host_by_device(source_mesh, destination_mesh)
    while active := {number: rank for number, rank in ranks.items() if rank.pending is not None}:
        progress = 0
        pending = ((n, *message) for n in source_mesh.devices for message in ranks[n].pending or ())
        senders = [n for n, direction, m in pending if direction == "to" and host[m.peer] != host[n]]
        assert len(set(senders)) == len({host[n] for n in senders}), "two devices send over one host's link"
        for number, rank in active.items():
            for message in [m for direction, m in rank.pending if direction == "to"]:
                peer, receive = ranks[message.peer], ("from", message._replace(peer=number))
                if peer.pending and receive in peer.pending:
                    data = rank.tile[message.start : message.stop]
                    assert (data >= 0).all(), "sends data that it has not received"
                    peer.tile[message.start : message.stop] = data
                    rank.pending.remove(("to", message))
                    peer.pending.remove(receive)
                    progress += 1
        for rank in active.values():
            if not rank.pending:
                rank.next_round()
                progress += 1
        assert progress, f"ranks {sorted(active)} wait for each other"
    return ranks


def messages_of(program):
    return (message for step in program.steps for round_ in step.rounds for message in round_.sends)


def sent_elements(program) -> int:
    return sum(message.stop - message.start for message in messages_of(program))


def check_execution(resharding_plan, program_of=rank_program) -> dict[int, SimulatedRank]:
    """Execute a plan. Fail if a rank gets wrong values, or if ranks send more or fewer elements than planned."""
    tensor = np.arange(math.prod(resharding_plan.shape)).reshape(resharding_plan.shape)
    ranks = execute(resharding_plan, tensor, program_of)
    tiles = resharding_plan.destination_mesh.tiles(resharding_plan.shape, resharding_plan.destination)
    for device, tile in tiles.items():
        assert (ranks[device].local == tensor[tuple(slice(*r) for r in tile)]).all()
    assert sum(sent_elements(rank.program) for rank in ranks.values()) == resharding_plan.sent_elements
    return ranks


def crossing_elements(resharding_plan, program_of=rank_program) -> int:
    """Return the number of elements that are sent to another host."""
    host = host_by_device(resharding_plan.destination_mesh)
    ranks = check_execution(resharding_plan, program_of)
    sent = [(number, m) for number, rank in ranks.items() for m in messages_of(rank.program)]
    return sum(m.stop - m.start for number, m in sent if host.get(number) != host[m.peer])


def global_tensor(shape, dtype=torch.float64, salt: int = 0) -> torch.Tensor:
    """Return small integers, which every dtype holds exactly, with no two equal neighbors."""
    return ((torch.arange(math.prod(shape)) * 37 + salt) % 251).to(dtype).view(shape)


def local_tensor(tensor: torch.Tensor, mesh: StageMesh, layout: Layout, rank: int) -> torch.Tensor:
    tile = mesh.tiles(tuple(tensor.shape), layout)[rank]
    return tensor[tuple(slice(*r) for r in tile)].contiguous()


def sent_and_expected(resharding_plan: ReshardingPlan, tensor: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the tensor that this rank sends, None on a receiver, and the tensor that it must receive or None."""
    rank, p = dist.get_rank(), resharding_plan
    sides = (p.source_mesh, p.source), (p.destination_mesh, p.destination)
    return [local_tensor(tensor, *side, rank) if rank in side[0].devices else None for side in sides]


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def new_link(name: str = "forward", **options) -> Link:
    return Link(name, dist.new_group(**options), torch.device("cpu"))


def strided(local: torch.Tensor | None) -> torch.Tensor | None:
    """Return the same values with no two of them adjacent in memory."""
    return None if local is None else torch.stack([local, local + 1], dim=-1)[..., 0]


def transfer_all(plans: list[ReshardingPlan], dtype: torch.dtype, prepare=Link.prepare) -> list[bool]:
    """Execute all plans, each twice, at the same time on one link; wait in the opposite order."""
    link = new_link()
    prepared = [prepare(link, resharding_plan, dtype) for resharding_plan in plans] * 2
    pairs = [sent_and_expected(p.plan, global_tensor(p.plan.shape, dtype, salt)) for salt, p in enumerate(prepared)]
    transfers = [p.start(strided(sent)) for p, (sent, _) in zip(prepared, pairs, strict=True)]
    received = [transfer.wait() for transfer in reversed(transfers)][::-1]
    link.close()
    return [is_same(local, expected) for local, (_, expected) in zip(received, pairs, strict=True)]


def transfer_in_small_chunks(plans: list[ReshardingPlan], prepare=Link.prepare) -> list[bool]:
    with patch.dict(MIN_CHUNK_BYTES, cpu=64):
        return transfer_all(plans, torch.float32, prepare)
