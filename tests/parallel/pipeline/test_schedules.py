"""Schedules have the published orders, memory and bubbles, and their simulation the known step times."""

import random

import pytest

from gpt4d.config import ConfigError
from gpt4d.parallel.pipeline import __main__, schedule
from gpt4d.parallel.pipeline.schedule import Action, peak_in_flight, problem
from gpt4d.parallel.pipeline.simulation import Costs, Deadlock, simulate
from gpt4d.parallel.pipeline.stage_program import SCHEDULES, orders_of


def words(order):
    return " ".join(str(action)[1:] for action in order)


def test_the_published_order_of_eager_1f1b():
    """The example has four stages and eight microbatches (arXiv 2211.05322, §4)."""
    orders = schedule.eager_1f1b(4, 8)
    assert words(orders[0]) == "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7"
    assert words(orders[1]) == "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7"
    assert words(orders[2]) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert words(orders[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert [str(action) for action in orders[3][:2]] == ["3F0", "3B0"]


@pytest.mark.parametrize(
    ("orders", "peaks"),
    [
        (schedule.gpipe(4, 8), [8, 8, 8, 8]),
        (schedule.one_forward_one_backward(4, 8), [4, 3, 2, 1]),
        (schedule.eager_1f1b(4, 8), [7, 5, 3, 1]),
        (schedule.zb_h1(4, 8), [4, 4, 4, 4]),
    ],
)
def test_activations_in_flight(orders, peaks):
    assert list(map(peak_in_flight, orders)) == peaks


@pytest.mark.parametrize(
    ("transfer", "plain", "eager", "split"), [(0, 33, 33, 30), (0.5, 41, 36, 33), (1, 49, 39, 36), (2, 65, 48, 42)]
)
def test_step_times_of_four_stages_and_eight_microbatches(transfer, plain, eager, split):
    costs = Costs.equal(4, 1, 1, 1, transfer)
    assert simulate(schedule.one_forward_one_backward(4, 8), costs).seconds == plain
    assert simulate(schedule.eager_1f1b(4, 8), costs).seconds == eager
    assert simulate(orders_of("eager_1f1b_w", 4, 8, costs), costs).seconds == split


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 3, 1.5)], ids=str)
@pytest.mark.parametrize("stages", [2, 4])
def test_published_bubbles(seconds, stages):
    forward, inputs, weights = seconds
    work = 8 * sum(seconds)

    def idle(orders, chunks=1):
        costs = Costs.equal(stages * chunks, *(s / chunks for s in seconds))
        return simulate(orders, costs).seconds - work

    whole = (stages - 1) * sum(seconds)
    assert idle(schedule.one_forward_one_backward(stages, 8)) == pytest.approx(whole)
    for chunks in (2, 4):
        assert idle(schedule.interleaved_1f1b(stages, 8, chunks), chunks) == pytest.approx(whole / chunks)
    assert idle(schedule.zb_h1(stages, 8)) == pytest.approx((stages - 1) * (forward + inputs - weights))


def test_tensors_that_skip_stages_wait_for_the_last_one():
    """A skip connection over four stages: arXiv 2211.05322 holds 6 to 8 tensors under eager 1F1B, 4 under 1F1B."""
    for transfer, held in ((0.0, 6), (0.5, 7), (1.0, 8)):
        edges = dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], transfer)
        costs = Costs([1] * 4, [1] * 4, [1] * 4, edges)
        assert simulate(schedule.eager_1f1b(4, 8), costs).peak_waiting(3) == held
        assert simulate(schedule.one_forward_one_backward(4, 8), costs).peak_waiting(3) == 4


def test_every_schedule_is_complete_and_ends_for_random_costs():
    draw = random.Random(1)
    for _ in range(100):
        name, stages = draw.choice(SCHEDULES), draw.randint(1, 5)
        chunks = draw.randint(1, 3) if name == "interleaved_1f1b" else 1
        microbatches = stages * draw.randint(1, 3) if name == "interleaved_1f1b" else draw.randint(1, 9)
        parts = stages * chunks
        forward, inputs, weights = ([draw.random() for _ in range(parts)] for _ in range(3))
        edges = {(stage, stage + 1): draw.random() for stage in range(parts - 1)}
        costs = Costs(forward, inputs, weights, edges)
        orders = orders_of(name, stages, microbatches, costs, chunks)
        assert problem(orders, parts, microbatches) is None, name
        timeline = simulate(orders, costs)
        busiest = max(sum(costs.seconds(action) for action in order) for order in orders)
        assert timeline.seconds >= busiest * (1 - 1e-12)  # sum() of Python 3.12 rounds less
        starts = {span.action: span.start for spans in timeline.stages for span in spans}
        for transfer in timeline.transfers:
            kind, microbatch, _ = transfer.action
            users = [Action(k, microbatch, transfer.target) for k in ("F" if kind == "F" else "BI")]
            assert all(starts[user] >= transfer.stop for user in users if user in starts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0 F1", "has no 0B1"),
        ("F0 B0 B1 F1", "0B1 is not after its F"),
        ("F0 F0 B0 F1 B1", "0F0 occurs twice"),
        ("F0 F1 B0 W1 I1", "0W1 is not after its I"),
        ("F0 F1 B0 I0 B1", "0I0 computes a gradient again"),
    ],
)
def test_what_is_no_schedule(text, message):
    order = [Action(word[0], int(word[1:])) for word in text.split()]
    assert message in problem([order], 1, 2)


def test_stages_that_wait_for_each_other_are_named():
    orders = [schedule.single_stage(2), [Action(kind, m, 1) for m in (1, 0) for kind in "FB"]]
    with pytest.raises(Deadlock, match="0B0, 1F1"):
        simulate(orders, Costs.equal(2, 1, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved_1f1b", 4, 6), "parallel.pipeline.microbatches=6: .* use 4 or 8"),
        (("1f1b", 4, 8, 2), "parallel.pipeline.chunks_per_stage=2: .* use parallel.pipeline.schedule=interleaved_1f1b"),
    ],
)
def test_numbers_that_do_not_suit_a_schedule(arguments, message):
    name, stages, microbatches, *chunks = arguments
    with pytest.raises(ConfigError, match=message):
        orders_of(name, stages, microbatches, Costs.equal(stages, 1, 1, 1), *chunks)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stages=1000000000000", "stages·microbatches·chunks_per_stage=8000000000000: use a value of at most"),
        ("stages=100000", "stages·microbatches·chunks_per_stage=800000: use a value of at most 100,000"),
        ("stages=0", "stages=0: use a value of at least 1"),
        ("forward=nan", "forward=nan: use a value of at least 0"),
        ("backward=inf", "backward=inf: use a value of at most"),
        ("transfer=-1", "transfer=-1.0: use a value of at least 0"),
    ],
)
def test_numbers_that_no_schedule_can_have_are_one_line(argument, message):
    with pytest.raises(ConfigError, match=message):
        __main__.main([argument])
