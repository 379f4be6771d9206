"""Layouts and unit tasks, senders and order: the paper's cases, and small instances against an exhaustive solver."""

import dataclasses
import random
import subprocess
import sys
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import jobs as schedules
from gpt4d.parallel.resharding.jobs import SendJob, lower_bound, send_jobs, together
from gpt4d.parallel.resharding.mesh import StageMesh, notation, parse, unit_tasks
from gpt4d.parallel.resharding.plan import gradient_plan, plan, schedule
from tests.support.environment import REPOSITORY
from tests.support.grids import full
from tests.support.reshardings import TABLE_2, check_plan, host_by_device, plan_table_2, reshardings

CAPTURED = {"capture_output": True, "text": True, "check": True}


@pytest.mark.parametrize(
    ("spec", "layout"),
    [("S0RR", Layout(("0",), (), ())), ("RS01", Layout((), ("0", "1"))), ("S1S0", Layout(("1",), ("0",)))],
)
def test_spec_and_layout_convert_into_each_other(spec, layout):
    assert parse("src", spec) == layout
    assert notation(layout) == spec


@pytest.mark.parametrize("spec", ["", "S", "RX", "s0R", "S0,R", "S0S0", "S00R"])
def test_invalid_spec_is_rejected_with_its_key(spec):
    with pytest.raises(ConfigError, match=f"^dst={spec}: "):
        parse("dst", spec)


def test_mesh_of_grid_gives_each_rank_its_tile():
    """Data=2, z=2, y=2 on ranks 8 to 15."""
    mesh = StageMesh.of_grid(range(8, 16), GridSizes(y=2, z=2, data=2), ranks_per_host=4)
    assert mesh.axes == (("data", 2), ("z", 2), ("y", 2), ("x", 1)) and mesh.hosts == (2,) * 4 + (3,) * 4
    columns = ((0, 5), (5, 10))
    assert mesh.tiles((8, 3, 10), Layout(("data", "z"), (), ("y",))) == {
        8 + i: ((i // 2 * 2, i // 2 * 2 + 2), (0, 3), columns[i % 2]) for i in range(8)
    }


@settings(max_examples=80, deadline=None)
@given(reshardings())
def test_each_element_is_in_one_task_with_all_its_holders_and_needers(case):
    """No two tasks have the same source and destination tile."""
    shape, source, first, destination, second = case
    tasks, task_of = unit_tasks(*case), np.full(shape, -1)
    for number, task in enumerate(tasks):
        region = task_of[tuple(slice(*r) for r in task.tile)]
        assert region.size == task.elements > 0 and (region == -1).all()
        region[...] = number
    assert (task_of >= 0).all()
    for mesh, layout, side in ((first, source, "senders"), (second, destination, "receivers")):
        for device, tile in mesh.tiles(shape, layout).items():
            held = np.zeros(shape, bool)
            held[tuple(slice(*r) for r in tile)] = True
            named = np.array([device in getattr(task, side) for task in tasks])
            assert (named[task_of] == held).all()
    tile_of = {**first.tiles(shape, source), **second.tiles(shape, destination)}
    assert len({(tile_of[task.senders[0]], tile_of[task.receivers[0]]) for task in tasks}) == len(tasks)


@pytest.mark.parametrize("case", TABLE_2)
def test_table_2_cases_reach_their_best_makespan(case):
    *_, tasks, _, best = TABLE_2[case]
    found = plan_table_2(case)
    assert len(found.tasks) == tasks and found.makespan == found.lower_bound == best


def test_load_balance_assigns_longest_first_to_the_least_loaded_host():
    jobs = [SendJob(0, (0, 1), (9,), (9,), d) for d in (2, 3, 5, 4)]
    assert schedules.load_balance(jobs) == [(2, 0), (3, 1), (1, 1), (0, 0)]


def test_receivers_on_a_host_that_holds_the_data_use_no_link():
    """Destination devices on hosts 0 and 1 copy from the sources there; only host 2 is sent the data."""
    first = StageMesh.of_shape((4,), hosts=(0, 0, 1, 1))
    second = StageMesh.of_shape((3,), 4, hosts=(0, 1, 2))
    resharding_plan = plan((6,), parse("", "R"), first, parse("", "R"), second)
    assert resharding_plan.makespan == resharding_plan.lower_bound == 1
    times = {(send.sender_host, send.receiver_hosts): send.stop - send.start for send in resharding_plan.sends}
    assert times == {(0, (0,)): 0, (1, (1,)): 0, (0, (2,)): 1}


def test_sends_are_spread_over_the_devices_of_a_host():
    assert sorted(send.sender for send in plan_table_2(3).sends) == [0, 1, 4, 5]


@settings(max_examples=12, deadline=None)
@given(reshardings())
def test_a_plan_covers_all_receivers_and_never_oversubscribes_a_link(case):
    check_plan(plan(*case))


def solve(jobs: list[SendJob]) -> int:
    """Return the minimum makespan by trying every job from every host next, without pruning or bounds."""
    hosts = sorted({host for job in jobs for host in (*job.sender_hosts, *(-1 - h for h in job.receiver_hosts))})

    @cache
    def best(remaining: frozenset[int], free: tuple[int, ...]) -> int:
        """``free``: from when on each host can send or, for negative numbers, receive."""
        if not remaining:
            return max(free)
        makespans = []
        for number in remaining:
            for host in jobs[number].sender_hosts:
                used = [hosts.index(host), *(hosts.index(-1 - h) for h in jobs[number].receiver_hosts)]
                stop = max(free[i] for i in used) + jobs[number].duration
                new_free = tuple(stop if i in used else t for i, t in enumerate(free))
                makespans.append(best(remaining - {number}, new_free))
        return min(makespans)

    return best(frozenset(range(len(jobs))), (0,) * len(hosts))


def random_jobs(rng: random.Random) -> list[SendJob]:
    """Return jobs of which many conflict in ways that no single link shows, such as all pairs of three receivers."""
    senders, receivers = range(rng.choice((1, 2, 3, 6))), range(10, 10 + rng.choice((2, 3, 4)))
    max_duration = rng.choice((1, 2, 7))

    def sample(hosts, maximum):
        return tuple(sorted(rng.sample(hosts, min(len(hosts), rng.randint(1, maximum)))))

    def job(number):
        sender_hosts, receiver_hosts = sample(senders, rng.choice((1, 1, 3))), sample(receivers, 2)
        return SendJob(number, sender_hosts, receiver_hosts, (), rng.randint(1, max_duration))

    return [job(number) for number in range(rng.randint(3, 6))]


@pytest.mark.slow
@pytest.mark.parametrize("instances", [15, full(100)])
def test_small_instances_reach_the_optimum_of_an_exhaustive_solver(instances):
    rng, above_bound = random.Random(8), 0
    for _ in range(instances):
        jobs = random_jobs(rng)
        optimum = solve(jobs)
        assert lower_bound(jobs) <= optimum
        for sequence, proved in (schedules.dfs(jobs), schedules.ensemble(jobs)):
            assert proved
            assert schedules.makespan(jobs, sequence) == optimum
        assert schedules.makespan(jobs, schedules.greedy(jobs)) >= optimum
        above_bound += optimum > lower_bound(jobs)
    assert above_bound > instances / 20  # only these need a search of the complete tree


@settings(max_examples=20, deadline=None)
@given(reshardings(max_devices=6))
def test_small_reshardings_reach_the_optimum_of_an_exhaustive_solver(case):
    resharding_plan = plan(*case)
    between_hosts = [send for send in resharding_plan.sends if send.stop > send.start]
    if 0 < len(between_hosts) <= 6:
        host, jobs = host_by_device(case[2], case[4]), []
        for send in between_hosts:
            task = resharding_plan.tasks[send.task]
            hosts = (tuple({host[device] for device in devices}) for devices in (task.senders, send.receivers))
            jobs.append(SendJob(0, *hosts, (), task.elements))
        elements = sum(task.elements for task in resharding_plan.tasks)
        assert resharding_plan.makespan == resharding_plan.lower_bound == Fraction(solve(jobs), elements)


@pytest.mark.slow
def test_equal_arguments_give_equal_plans_in_every_process():
    """Sets of strings, hash seeds and clocks must not matter: two processes with different hash seeds agree."""
    code = (
        "from tests.support.reshardings import *\n"
        "print([plan_between((7, 9), 'S1S0', (3, 2), s, (2, 3)) for s in ('RS10', 'S01R', 'RR')])\n"
        "print(plan_table_2(4))"
    )
    environment = {"PYTHONPATH": ":".join([str(REPOSITORY), *sys.path])}
    first, second = (
        subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONHASHSEED": seed}, **CAPTURED).stdout
        for seed in "12"
    )
    assert first == second != ""


def test_search_stops_by_count_where_no_order_reaches_the_bound(monkeypatch):
    """The clock does not matter, and a plan from an incomplete search has a bound below its makespan."""

    def allow(choices: int) -> None:
        monkeypatch.setattr(schedules, "DFS_CHOICES", choices)
        monkeypatch.setattr(schedules, "GREEDY_CHOICES", choices)

    rng = random.Random(0)
    outcomes = []
    for _ in range(5):
        jobs = [SendJob(n, (n % 3,), (10 + n // 3,), (), rng.randint(5, 9)) for n in range(9)]
        allow(5000)  # enough for the complete tree
        best, complete = schedules.ensemble(jobs)
        allow(50)
        (first, proved), again = schedules.ensemble(jobs), schedules.ensemble(jobs)
        assert (first, proved) == again
        sequences = (schedules.dfs(jobs)[0], schedules.greedy(jobs), first, best)
        dfs, greedy, ensemble, optimum = (schedules.makespan(jobs, sequence) for sequence in sequences)
        assert complete and optimum <= ensemble <= min(dfs, greedy)
        outcomes.append((proved, ensemble > optimum, dfs != greedy))
    assert (False, True, True) in outcomes  # an incomplete search missed the optimum, and the two searches differ


def test_gradient_plan_reverses_the_forward_plan():
    forward = plan_table_2(7)
    backward = gradient_plan(forward)
    assert (backward.source, backward.destination) == (forward.destination, forward.source)
    assert backward.makespan == 1  # one replica's gradient to one host
    summed = gradient_plan(forward, partial=("0",))
    assert summed.shape == (2, *forward.shape) and summed.num_summed == 1
    assert summed.makespan == 2  # the contributions of both replicas to one host
    with pytest.raises(AssertionError):
        gradient_plan(plan_table_2(1), partial=("0",))


def test_lower_bound_is_the_load_of_the_busiest_links():
    def job(senders, receivers, duration):
        return SendJob(0, senders, receivers, (), duration)

    assert lower_bound([job((0,), (9,), 3), job((1,), (9,), 4)]) == 7  # one receiver
    assert lower_bound([job((0,), (8,), 3), job((0,), (9,), 4)]) == 7  # one sender
    assert lower_bound([job((0, 1), (host,), 1) for host in (7, 8, 9)]) == 2  # two senders, rounded up
    chained = [job((0, 1), (6,), 4), job((1, 2), (7,), 4), job((0, 2), (8,), 4), job((0, 1), (9,), 4)]
    assert lower_bound(chained) == 6  # 16 from the union of three hosts


def test_first_sequence_needs_no_search(monkeypatch):
    """The longest jobs come last: depth-first search alone takes them first and backtracks 2^n times."""
    monkeypatch.setattr(schedules, "DFS_CHOICES", 1000)
    jobs = [SendJob(number, (number,), (100 + number,), (), number + 1) for number in range(40)]
    assert schedules.makespan(jobs, schedules.dfs(jobs)[0]) == 40


def test_hosts_are_served_separately_if_a_chain_must_wait_for_all():
    """Three tasks, each to two of three hosts: no two chains overlap, but sends to single hosts do."""
    first, second = StageMesh.of_shape((3, 1)), StageMesh.of_shape((3, 2), 3, hosts=(3, 4, 4, 5, 3, 5))
    case = (3,), parse("", "S0"), first, parse("", "S0"), second
    assert plan(*case).makespan == plan(*case).lower_bound == Fraction(2, 3)
    tasks = unit_tasks(*case)
    *_, makespan, _ = schedule(case, 0, tasks, [send_jobs(tasks, first, second, together)])
    assert makespan == 1


def test_a_host_that_also_sends_is_last_in_a_chain():
    first, second = StageMesh.of_shape((2, 1)), StageMesh.of_shape((2, 2), 2, hosts=(1, 2, 3, 4))
    resharding_plan = plan((2,), parse("", "S0"), first, parse("", "S0"), second)
    assert {send.receiver_hosts for send in resharding_plan.sends} == {(2, 1), (3, 4)}


def test_plans_are_cached():
    assert plan_table_2(4) is plan_table_2(4)
    assert dataclasses.replace(plan_table_2(4), num_summed=1) != plan_table_2(4)
