"""Results and errors of rank 0 reach every rank."""

import math
import threading
import traceback

import pytest
import torch.distributed as dist

from gpt4d.checkpoint.tensor_files import Damaged
from gpt4d.config import ConfigError
from gpt4d.runtime import consensus
from gpt4d.runtime.consensus import all_gather_json, all_ranks_true, gather_in_group, run_on_all_ranks
from tests.support.grids import full, train_in_rank
from tests.support.rank_pool import RankFailure


def work_slowly_on_rank_0(answer):
    """On a rank: rank 0 works until it has broadcast several keepalives."""
    consensus.KEEPALIVE_S = 0.01
    enough, sent = threading.Event(), []
    broadcast = consensus.broadcast_from_rank0

    def count_keepalives(value):
        sent.append(value)
        if sent.count(None) >= 5:
            enough.set()
        return broadcast(value)

    def work():
        assert enough.wait(60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    consensus.broadcast_from_rank0 = count_keepalives
    try:
        return consensus.run_on_rank0(work, "work")
    finally:
        consensus.broadcast_from_rank0, consensus.KEEPALIVE_S = broadcast, 60.0


def test_keepalives_the_result_and_a_mistake_of_rank_0_reach_other_ranks(ranks):
    assert ranks.run(3, work_slowly_on_rank_0, {"a": 1}) == [{"a": 1}] * 3
    with pytest.raises(RankFailure) as raised:
        ranks.run(3, work_slowly_on_rank_0, ConfigError("a mistake"))
    assert str(raised.value).count("ConfigError: a mistake") == 3


def gather_various():
    rank = dist.get_rank()
    group = [dist.new_group([0, 2]), dist.new_group([1])][rank % 2]
    value = {"rank": rank, "text": "é\0\udc80" * 100 * rank, "numbers": [1 / 3, math.inf, 1 << 70], "none": None}
    assert all_gather_json(value, "values")[rank] == value
    return [received["rank"] for received in gather_in_group(value, group)], len(gather_in_group(None))


def test_values_of_different_lengths_reach_the_ranks_of_a_group(ranks):
    assert ranks.run(3, gather_various) == [([0, 2], 3), ([1], 3), ([0, 2], 3)]


def raise_on_rank_1(error):
    def work():
        if dist.get_rank() == 1:
            raise error

    try:
        run_on_all_ranks(work, "work")
    except Exception as raised:
        return type(raised), str(raised)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ConfigError("a mistake"), (ConfigError, "a mistake")),
        (Damaged("a file"), (Damaged, "a file")),
        (KeyError("a"), (RuntimeError, "work: rank 1 failed: KeyError('a')")),
    ],
)
def test_an_error_of_one_rank_is_raised_by_it_and_as_a_known_class_on_every_other_rank(ranks, error, raised):
    assert ranks.run(3, raise_on_rank_1, error) == [raised, (type(error), str(error)), raised]


def receivers_of_pickles(config):
    """On a rank: train, and return the files whose code has received a pickle from another rank."""
    receive, receivers = dist.distributed_c10d._tensor_to_object, set()

    def record(*args):
        receivers.add(traceback.extract_stack()[-3].filename)
        return receive(*args)

    dist.distributed_c10d._tensor_to_object = record
    try:
        train_in_rank(config)
    finally:
        dist.distributed_c10d._tensor_to_object = receive
    return receivers


@pytest.mark.parametrize("grid", [full(["parallel.gz=2"]), ["parallel.pipeline.stages=2", "profile.steps=2"]])
def test_no_rank_receives_a_pickle(ranks, tiny, grid):
    config = tiny(*grid, "train.steps=3", "checkpoint.every=2")
    assert ranks.run(2, receivers_of_pickles, config) == [set(), set()]


def answers_of_ranks():
    """On a rank: whether all ranks agree on a flag that every rank sets, and on a flag that only rank 0 sets."""
    return all_ranks_true(True, "agreeing"), all_ranks_true(dist.get_rank() == 0, "disagreeing")


def test_ranks_agree_only_if_the_flag_is_true_on_all_ranks(ranks):
    assert ranks.run(3, answers_of_ranks) == [(True, False)] * 3
