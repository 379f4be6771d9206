"""What each rank does, carried out in one process, message by message: any plan, any number of ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt4d.parallel.resharding.planning import STRATEGIES, plan
from gpt4d.parallel.resharding.program import Message, Round, program
from tests.parallel.resharding.cases import nine, plan_between, reshardings

_CHUNK_EACH = 128 * 1024  # elements so large that each is a chunk of its own


class Rank:
    """A rank that is at one round of its program, and cannot go on before all its messages have met their other ends.

    So NCCL behaves, the stricter of the two backends: where no ranks wait in a circle here, they do so nowhere.
    """

    def __init__(self, found, rank, whole):
        self.program = program(found, rank, _CHUNK_EACH)
        self.steps = iter(self.program.steps)
        self.step, self.rounds, self.open = None, iter(()), None
        mesh, layout = (found.destination_mesh, found.destination)
        self.local = np.full(self.program.shape, -1)
        if not self.program.receives:
            mesh, layout = found.source_mesh, found.source
            tile = mesh.tiles(found.shape, layout)[rank]
            self.local = whole[tuple(slice(*r) for r in tile)].copy()
        self.next_round()

    def next_round(self):
        """Moves on; ``open`` is what is to be sent and received now, None at the end."""
        self.open = None
        while (one := next(self.rounds, None)) is None:
            if self.step is not None and not self.step.sending:
                self.local[self.step.place] = self.tile.reshape(self.step.shape)
            self.step = next(self.steps, None)
            if self.step is None:
                return
            part = self.local[self.step.place]
            self.tile = part.reshape(-1).copy() if self.step.sending else np.full(part.size, -1)
            self.rounds = iter(in_turn(self.step))
        self.open = {("to", m) for m in one.sends} | {("from", m) for m in one.receives}


def in_turn(step):
    """A step's rounds between the two words that say whose turn it is: messages of nothing."""
    word = [() if rank is None else (Message(rank, 0, 0),) for rank in (step.turn_from, step.turn_to)]
    rounds = [Round((), word[0]), *step.rounds, Round(word[1], ())]
    return [one for one in rounds if one.sends or one.receives]


def carry_out(found, whole) -> dict[int, Rank]:
    """All ranks to the end. Fails where none can go on."""
    ranks = {rank: Rank(found, rank, whole) for rank in (*found.source_mesh.devices, *found.destination_mesh.devices)}
    host = dict(zip(found.source_mesh.devices, found.source_mesh.hosts, strict=True))
    host |= dict(zip(found.destination_mesh.devices, found.destination_mesh.hosts, strict=True))
    sources = found.source_mesh.devices
    while moving := {number: rank for number, rank in ranks.items() if rank.open is not None}:
        met = 0
        now = [n for n in sources for way, m in ranks[n].open or () if way == "to" and host[m.peer] != host[n]]
        assert len(set(now)) == len({host[number] for number in now}), "two devices send through one host's link"
        for number, rank in moving.items():
            for message in [m for way, m in rank.open if way == "to"]:
                other, there = ranks[message.peer], ("from", message._replace(peer=number))
                if other.open and there in other.open:
                    piece = rank.tile[message.start : message.stop]
                    assert (piece >= 0).all(), "sends what it has not received"
                    other.tile[message.start : message.stop] = piece
                    rank.open.remove(("to", message))
                    other.open.remove(there)
                    met += 1
        for rank in moving.values():
            if not rank.open:
                rank.next_round()
                met += 1
        assert met, f"ranks {sorted(moving)} wait for each other"
    return ranks


def check(found):
    whole = np.arange(math.prod(found.shape)).reshape(found.shape)
    ranks = carry_out(found, whole)
    for device, tile in found.destination_mesh.tiles(found.shape, found.destination).items():
        assert (ranks[device].local == whole[tuple(slice(*r) for r in tile)]).all()
    return ranks


@settings(max_examples=100, deadline=None)
@given(reshardings(), st.sampled_from(STRATEGIES[:4]))
def test_every_rank_gets_its_part_and_none_waits_in_a_circle(case, strategy):
    check(plan(*case, strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_meshes_of_128_devices(strategy):
    check(plan_between((12, 16, 10), "S02RS1", (4, 8, 4), "S1RS0", (16, 8), strategy=strategy))


def test_a_broadcast_sends_each_host_the_data_once():
    """Between hosts a task's elements travel once to each host of its receivers; send_recv's to each device."""
    shape = (8, 6)

    def crossing(strategy):
        found = plan_between(shape, "S1R", (1, 2), "RR", (3, 2), strategy=strategy)
        host = dict(zip(found.destination_mesh.devices, found.destination_mesh.hosts, strict=True))
        ranks = check(found)
        total = 0
        for number, rank in ranks.items():
            for step in rank.program.steps:
                for message in (m for one in step.rounds for m in one.sends):
                    total += (message.stop - message.start) * (host.get(number) != host[message.peer])
        return total / math.prod(shape)

    assert crossing("broadcast") == crossing("local_allgather") == 3
    assert crossing("send_recv") == 6


def test_chunks_follow_each_other_along_the_chain():
    """A device hands a chunk on in the round in which it receives the next one."""
    found = plan_between((5,), "R", (1, 1), "R", (3, 1))
    second = program(found, 2, _CHUNK_EACH).steps[0].rounds
    assert [(len(one.receives), len(one.sends)) for one in second] == [(1, 0), *[(1, 1)] * 4, (0, 1)]
    assert second[1].receives[0].start == second[2].sends[0].start == 1


def test_the_number_of_chunks_comes_from_the_size():
    def chunks(elements, receivers=2):
        found = plan_between((elements,), "R", (1, 1), "R", (receivers, 1))
        return len(program(found, 0, 4).steps[0].rounds)

    assert chunks(1) == chunks(40_000) == 1  # 160 kB
    assert chunks(4 * 32 * 1024) == 4
    assert chunks(100_000_000) == 128
    assert chunks(100_000_000, receivers=1) == 128  # who looks ahead should not see all of it


def test_a_signal_is_one_element_of_each_task():
    found = nine(4, strategy="signal")
    assert sum(program(found, rank, 2).sent_elements for rank in range(16)) == 64
