"""Rank programs executed in one process, message by message, for any plan and any number of ranks."""

import pytest
from hypothesis import given, settings

from gpt4d.config import GridSizes
from gpt4d.parallel.layout import CHUNK, Layout
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.plan import plan, rank_program
from tests.support.grids import full
from tests.support.reshardings import (
    ELEMENT_BYTES,
    check_execution,
    crossing_elements,
    plan_between,
    reshardings,
)


@settings(max_examples=50, deadline=None)
@given(reshardings())
def test_every_rank_gets_its_tile_and_no_ranks_wait_in_a_cycle(case):
    check_execution(plan(*case))


@pytest.mark.parametrize(("source", "destination"), [((2, 3, 4), (6, 4)), full((4, 8, 4), (16, 8))], ids=["24", "128"])
def test_meshes_of_many_devices(source, destination):
    check_execution(plan_between((12, 16, 10), "S02RS1", source, "S1RS0", destination))


def test_each_host_is_sent_the_data_once():
    assert crossing_elements(plan_between((8, 6), "S1R", (1, 2), "RR", (3, 2))) == 3 * 8 * 6


def test_a_device_forwards_a_chunk_while_it_receives_the_next():
    resharding_plan = plan_between((5,), "R", (1, 1), "R", (3, 1))
    rounds = rank_program(resharding_plan, 2, ELEMENT_BYTES).steps[0].rounds
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
