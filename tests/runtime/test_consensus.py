"""Results and errors of rank 0 reach every rank."""

import threading

import pytest

from gpt4d.config import ConfigError
from gpt4d.runtime import consensus
from gpt4d.runtime.consensus import run_on_rank0
from tests.rank_pool import RankFailure


def catch_mistake_of_rank_0():
    def work():
        raise ConfigError("data.path: no")

    try:
        run_on_rank0(work)
    except ConfigError as error:
        return str(error)


def test_a_config_error_on_rank_0_is_raised_on_every_rank(ranks):
    assert ranks.run(3, catch_mistake_of_rank_0) == ["data.path: no"] * 3


def work_slowly_on_rank_0(answer):
    """On a rank: rank 0 works until it has broadcast several keepalives."""
    consensus._KEEPALIVE_S = 0.01
    enough, sent = threading.Event(), []
    broadcast = consensus._broadcast_from_rank0

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

    consensus._broadcast_from_rank0 = count_keepalives
    try:
        return consensus.run_on_rank0(work)
    finally:
        consensus._broadcast_from_rank0, consensus._KEEPALIVE_S = broadcast, 60.0


def test_keepalives_reach_other_ranks_while_rank_0_works(ranks):
    assert ranks.run(3, work_slowly_on_rank_0, {"a": 1}) == [{"a": 1}] * 3
    with pytest.raises(RankFailure) as raised:
        ranks.run(3, work_slowly_on_rank_0, ConfigError("a mistake"))
    assert str(raised.value).count("ConfigError: a mistake") == 3
