"""Programs: every transfer is started on both ends, after it exists, before it is used, and in one global order."""

import random
from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Costs
from gpt4d.parallel.pipeline.stage_program import SCHEDULES, StageTransfer, orders_of, programs


def random_pipeline(draw):
    """Orders and costs of a random schedule, with tensors that skip stages."""
    name, stages = draw.choice(SCHEDULES), draw.randint(1, 4)
    chunks = draw.randint(1, 3) if name == "interleaved_1f1b" else 1
    microbatches = stages * draw.randint(1, 2) if name == "interleaved_1f1b" else draw.randint(1, 6)
    parts = stages * chunks
    edges = [(stage, stage + 1) for stage in range(parts - 1)]
    edges += [(a, b) for a in range(parts) for b in range(a + 2, parts) if draw.random() < 0.3]
    forward, inputs, weights = ([draw.choice((0.5, 1.0, draw.random())) for _ in range(parts)] for _ in range(3))
    costs = Costs(forward, inputs, weights, {edge: draw.choice((0.0, 0.5, draw.random())) for edge in edges})
    return orders_of(name, stages, microbatches, costs, chunks), costs, microbatches


@pytest.mark.parametrize("seed", range(40))
def test_transfers_of_random_pipelines(seed):
    orders, costs, microbatches = random_pipeline(random.Random(seed))
    count, found = len(orders), programs(orders, costs)
    ends, following = Counter(), TopologicalSorter()
    for stage, program in enumerate(found):
        assert [step for step in program if isinstance(step, Action)] == orders[stage]
        place = {step: index for index, step in enumerate(program)}
        transfers = [step for step in program if isinstance(step, StageTransfer)]
        ends.update(transfers)
        for before, after in pairwise(transfers):
            following.add(after, before)
        for transfer in transfers:
            action, target = transfer
            if action.virtual_stage % count == stage:
                assert place[action] < place[transfer]
            else:
                kinds = "F" if action.kind == "F" else "BI"
                users = [Action(kind, action.microbatch, target) for kind in kinds]
                assert all(place[transfer] < place[user] for user in users if user in place)
    crossing = [(a, b) for a, b in costs.transfers if a % count != b % count]
    assert len(ends) == 2 * microbatches * len(crossing) and set(ends.values()) <= {2}
    list(following.static_order())  # raises CycleError if stages disagree about the order


def test_a_receiver_starts_before_the_action_during_which_the_tensor_comes_to_exist():
    """Stage 1 waits for its first microbatch, and starts to receive the second one concurrently."""
    first, second = programs(schedule.one_forward_one_backward(2, 2), Costs.equal(2, 1, 1, 1, 0.5))
    assert " ".join(map(str, first)) == "0F0 0F0>1 0F1 0F1>1 1B0>0 0B0 1B1>0 0B1"
    assert " ".join(map(str, second)) == "0F0>1 0F1>1 1F0 1B0 1B0>0 1F1 1B1 1B1>0"
