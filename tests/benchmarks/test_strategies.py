"""The strategies and orders of resharding that benchmarks compare: the paper's times, and correct transfers."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.laboratory.strategies import ORDERS, STRATEGIES, ComparedResharding, gradient_plan, plan, rank_program
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import plan as product
from gpt4d.parallel.resharding.mesh import StageMesh
from tests.support.reshardings import (
    TABLE_2,
    check_execution,
    check_plan,
    crossing_elements,
    plan_between,
    plan_table_2,
    reshardings,
    sent_elements,
    transfer_in_small_chunks,
)

DATA = [strategy for strategy in STRATEGIES if strategy != "signal"]


@pytest.mark.parametrize("case", TABLE_2)
def test_orders_of_table_2_have_the_makespans_of_the_paper(case):
    *_, naive, best = TABLE_2[case]
    for order in ("ensemble", "dfs", "greedy"):
        assert plan_table_2(case, make=plan, order=order).makespan == best
    assert plan_table_2(case, make=plan, order="naive").makespan == Fraction(naive)


@pytest.mark.parametrize(
    ("case", "times"), [(1, (2, 0.5, 0.5, 0.5)), (7, (8, 2, 2, 1)), (8, (3, 2, 2, 1))], ids=["1", "7", "8"]
)
def test_strategies_take_the_times_of_the_paper(case, times):
    strategies = ("send_recv", "local_allgather", "global_allgather", "broadcast")
    assert tuple(plan_table_2(case, make=plan, strategy=strategy).makespan for strategy in strategies) == times
    assert plan_table_2(case, make=plan, strategy="signal").makespan == 0


@pytest.mark.parametrize(("hosts", "devices"), [*itertools.product((1, 2, 3, 4), repeat=2)])
def test_one_sender_takes_the_times_of_figure_5(hosts, devices):
    times = {"send_recv": hosts * devices, "local_allgather": hosts, "global_allgather": min(hosts, 2), "broadcast": 1}
    for strategy, time in times.items():
        found = plan_between((64, 3), "RR", (1, 1), "RR", (hosts, devices), plan, strategy=strategy)
        assert found.makespan == time


@settings(max_examples=12, deadline=None)
@given(reshardings())
def test_a_plan_covers_all_receivers_and_never_oversubscribes_a_link(case):
    for strategy, order in itertools.product(STRATEGIES, ORDERS):
        check_plan(plan(*case, strategy=strategy, order=order))
    ours, compared = product.plan(*case), plan(*case)
    assert (compared.sends, compared.lower_bound) == (ours.sends, ours.lower_bound)


@settings(max_examples=50, deadline=None)
@given(reshardings(), st.sampled_from(DATA))
def test_every_rank_gets_its_tile_and_no_ranks_wait_in_a_cycle(case, strategy):
    check_execution(plan(*case, strategy=strategy), rank_program)


@pytest.mark.parametrize(("strategy", "crossings"), [("broadcast", 3), ("local_allgather", 3), ("send_recv", 6)])
def test_a_host_is_sent_the_data_once_or_once_for_each_device(strategy, crossings):
    found = plan_between((8, 6), "S1R", (1, 2), "RR", (3, 2), plan, strategy=strategy)
    assert crossing_elements(found, rank_program) == crossings * 8 * 6


def test_signal_sends_one_element_per_task():
    found = plan_table_2(4, make=plan, strategy="signal")
    programs = [rank_program(found, rank, 2) for rank in range(16)]
    assert sum(map(sent_elements, programs)) == found.sent_elements == 64


def test_chunks_and_shards_arrive_while_others_are_sent(ranks):
    """3 sources, 5 destinations on three hosts; tiles of hundreds of chunks, not contiguous on either side."""
    first, second = StageMesh.of_shape((3,)), StageMesh.of_shape((5,), 3, hosts=(7, 5, 7, 6, 5))
    plans = [
        plan((13, 9, 50), Layout((), ("0",), ()), first, Layout((), (), axes), second, strategy=strategy)
        for axes in ((), ("0",))
        for strategy in DATA
    ]
    assert all(all(correct) for correct in ranks.run(8, transfer_in_small_chunks, plans, ComparedResharding))


def signalled(found) -> bool:
    """On a rank: whether a signal, whose result is zeros but for one element, arrives."""
    from tests.support.reshardings import local_tensor, new_link

    link = new_link()
    prepared, receives = ComparedResharding(link, found, torch.float32), torch.distributed.get_rank() > 0
    sent = None if receives else local_tensor(torch.ones(found.shape), found.source_mesh, found.source, 0)
    received = prepared.start(sent).wait()
    link.close()
    return received is None or received.flatten().tolist() == [1] + [0] * (received.numel() - 1)


def test_a_signal_leaves_zeros(ranks):
    found = plan_between((5, 3), "RR", (1, 1), "RR", (2, 1), plan, strategy="signal")
    assert all(ranks.run(3, signalled, found))


def test_gradient_plan_has_the_options_of_the_forward_plan():
    backward = gradient_plan(plan_table_2(3, make=plan, strategy="send_recv", order="greedy"))
    assert (backward.strategy, backward.order) == ("send_recv", "greedy")
