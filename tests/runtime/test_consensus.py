"""What one rank meets reaches every rank."""

import threading

import pytest

from gpt4d.config import ConfigError
from gpt4d.runtime import consensus
from gpt4d.runtime.consensus import run_on_rank0
from tests.rank_pool import RankFailure


def fail_on_the_first_rank():
    def work():
        raise ConfigError("data.path: no")

    try:
        run_on_rank0(work)
    except ConfigError as error:
        return str(error)


def test_a_mistake_found_on_rank_0_is_raised_on_every_rank(ranks):
    assert ranks.run(3, fail_on_the_first_rank) == ["data.path: no"] * 3


def slow_on_the_first(answer):
    """On a rank: the first works for many signs of life."""
    consensus._SIGN_OF_LIFE_S = 0.01
    told, sent = threading.Event(), []
    first = consensus._from_first_rank

    def counted(value):
        sent.append(value)
        if sent.count(None) >= 5:
            told.set()
        return first(value)

    def work():
        assert told.wait(60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    consensus._from_first_rank = counted
    try:
        return consensus.run_on_rank0(work)
    finally:
        consensus._from_first_rank, consensus._SIGN_OF_LIFE_S = first, 60.0


def test_other_ranks_hear_from_a_first_rank_that_works_for_long(ranks):
    assert ranks.run(3, slow_on_the_first, {"a": 1}) == [{"a": 1}] * 3
    with pytest.raises(RankFailure) as raised:
        ranks.run(3, slow_on_the_first, ConfigError("a mistake"))
    assert str(raised.value).count("ConfigError: a mistake") == 3
