"""Rank programs executed in one process, message by message, for any plan and any number of ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.config import GridSizes
from gpt4d.parallel.layout import CHUNK, Layout
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.messages import PeerMessage, Round, rank_program
from gpt4d.parallel.resharding.plan import STRATEGIES, plan
from tests.parallel.resharding.cases import host_by_device, plan_between, plan_table_2, reshardings
from tests.support.grids import full

_ELEMENT_BYTES = 128 * 1024  # elements so large that each is a chunk


class SimulatedRank:
    """A rank that, as with NCCL, ends a round of its program only when the peers of all its messages have joined."""

    def __init__(self, resharding_plan, rank, tensor):
        self.program = rank_program(resharding_plan, rank, _ELEMENT_BYTES)
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


def execute(resharding_plan, tensor) -> dict[int, SimulatedRank]:
    """Run all ranks to the end; fail if no rank can continue."""
    source_mesh, destination_mesh = resharding_plan.source_mesh, resharding_plan.destination_mesh
    devices = (*source_mesh.devices, *destination_mesh.devices)
    ranks = {rank: SimulatedRank(resharding_plan, rank, tensor) for rank in devices}
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


def check(resharding_plan):
    tensor = np.arange(math.prod(resharding_plan.shape)).reshape(resharding_plan.shape)
    ranks = execute(resharding_plan, tensor)
    tiles = resharding_plan.destination_mesh.tiles(resharding_plan.shape, resharding_plan.destination)
    for device, tile in tiles.items():
        assert (ranks[device].local == tensor[tuple(slice(*r) for r in tile)]).all()
    assert sum(sent_elements(rank.program) for rank in ranks.values()) == resharding_plan.sent_elements
    return ranks


@settings(max_examples=50, deadline=None)
@given(reshardings(), st.sampled_from(STRATEGIES[:4]))
def test_every_rank_gets_its_tile_and_no_ranks_wait_in_a_cycle(case, strategy):
    check(plan(*case, strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
@pytest.mark.parametrize(("source", "destination"), [((2, 3, 4), (6, 4)), full((4, 8, 4), (16, 8))], ids=["24", "128"])
def test_meshes_of_many_devices(strategy, source, destination):
    check(plan_between((12, 16, 10), "S02RS1", source, "S1RS0", destination, strategy=strategy))


def test_broadcast_sends_each_host_the_data_once():
    """Broadcast sends a task's elements once to each receiving host, send_recv once to each device."""
    for strategy, crossings in (("broadcast", 3), ("local_allgather", 3), ("send_recv", 6)):
        resharding_plan = plan_between((8, 6), "S1R", (1, 2), "RR", (3, 2), strategy=strategy)
        host = host_by_device(resharding_plan.destination_mesh)
        sent = [(number, m) for number, rank in check(resharding_plan).items() for m in messages_of(rank.program)]
        assert sum(m.stop - m.start for number, m in sent if host.get(number) != host[m.peer]) == crossings * 8 * 6


def test_a_device_forwards_a_chunk_while_it_receives_the_next():
    resharding_plan = plan_between((5,), "R", (1, 1), "R", (3, 1))
    rounds = rank_program(resharding_plan, 2, _ELEMENT_BYTES).steps[0].rounds
    assert [(len(r.receives), len(r.sends)) for r in rounds] == [(1, 0), *[(1, 1)] * 4, (0, 1)]
    assert rounds[1].receives[0].start == rounds[2].sends[0].start == 1


def chunks(elements: int, receivers: int = 2, device_type: str = "cpu") -> int:
    """Return the number of messages in which a sender sends elements of 4 bytes to a chain of receivers."""
    resharding_plan = plan_between((elements,), "R", (1, 1), "R", (receivers, 1))
    return len(rank_program(resharding_plan, 0, 4, device_type).steps[0].rounds)


def test_number_of_chunks_depends_on_the_size_and_a_gpu_sends_long_messages():
    """Each message of NCCL is a kernel, which Python starts in about 100 us."""
    assert chunks(1) == chunks(40_000) == 1  # 160 kB
    assert chunks(4 * 32 * 1024) == 4
    assert chunks(100_000_000) == 128
    assert chunks(100_000_000, receivers=1) == 128  # a receive posted in advance must not cover the complete send
    assert chunks(8_250_000, device_type="cuda") == chunks(100_000_000, receivers=1, device_type="cuda") == 1
    assert chunks(100_000_000, device_type="cuda") == 23


def test_signal_sends_one_element_per_task():
    resharding_plan = plan_table_2(4, strategy="signal")
    programs = [rank_program(resharding_plan, rank, 2) for rank in range(16)]
    assert sum(map(sent_elements, programs)) == resharding_plan.sent_elements == 64


def test_a_device_sends_its_part_of_every_chunk():
    """Eight tokens in two chunks of which x has halves, to a stage whose data axis splits the batch first."""
    layout = Layout(("data", CHUNK, "x"))
    source = StageMesh.of_grid(range(2), GridSizes(x=2), chunks=2)
    destination = StageMesh.of_grid(range(2, 6), GridSizes(x=2, data=2), chunks=2)
    found = plan((8,), layout, source, layout, destination)
    tasks = [(task.tile[0], task.senders, task.receivers) for task in found.tasks]
    assert [(tile, receivers) for tile, _, receivers in tasks] == [
        ((i, i + 1), (2 + i // 4 * 2 + i % 2,)) for i in range(8)
    ]
    assert [senders for _, senders, _ in tasks] == [(i // 2 % 2,) for i in range(8)]
    steps = {step.task: step.slices for step in rank_program(found, 1, 8).steps}
    assert steps == {2: (slice(0, 1),), 3: (slice(1, 2),), 6: (slice(2, 3),), 7: (slice(3, 4),)}
    assert rank_program(found, 1, 8).shape == (4,) and rank_program(found, 5, 8).shape == (2,)
