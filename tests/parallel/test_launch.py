"""Rank and world from what launchers say, and errors that reach every rank."""

import threading

import pytest

from gpt4d.config import ConfigError
from gpt4d.parallel import launch
from gpt4d.parallel.launch import Launch, first_host, on_first_rank, tasks_on_node
from tests.rank_pool import RankFailure

SLURM_STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_NODELIST": "nid[001003-001004,001009]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_without_a_launcher_there_is_a_world_of_one():
    assert Launch.from_environment({}) == Launch()


def test_torchruns_variables():
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
    }
    assert Launch.from_environment(env) == Launch(5, 8, 1, 4, "h:9")


def test_the_variables_of_a_slurm_step():
    launch = Launch.from_environment(SLURM_STEP)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (9, 12, 1, 4)
    host, port = launch.master.split(":")
    assert host == "nid001003" and 20000 <= int(port) < 60000


def test_a_batch_script_without_srun_is_a_world_of_one():
    """There SLURM_NTASKS speaks of tasks that nobody started."""
    assert Launch.from_environment({"SLURM_JOB_ID": "71", "SLURM_NTASKS": "12", "SLURM_PROCID": "0"}) == Launch()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("nid[001-004,7],login1", "nid001"), ("n1", "n1"), ("a,b", "a"), ("gpu[3,5]-ib", "gpu3-ib"), ("x-[09]", "x-09")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_on_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


def fail_on_the_first_rank():
    def work():
        raise ConfigError("data.path: no")

    try:
        on_first_rank(work)
    except ConfigError as error:
        return str(error)


def test_a_mistake_found_on_rank_0_is_raised_on_every_rank(ranks):
    assert ranks.run(3, fail_on_the_first_rank) == ["data.path: no"] * 3


def slow_on_the_first(answer):
    """On a rank: the first works for many signs of life."""
    launch._SIGN_OF_LIFE_S = 0.01
    told, sent = threading.Event(), []
    first = launch._from_first_rank

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

    launch._from_first_rank = counted
    try:
        return launch.on_first_rank(work)
    finally:
        launch._from_first_rank, launch._SIGN_OF_LIFE_S = first, 60.0


def test_other_ranks_hear_from_a_first_rank_that_works_for_long(ranks):
    assert ranks.run(3, slow_on_the_first, {"a": 1}) == [{"a": 1}] * 3
    with pytest.raises(RankFailure) as raised:
        ranks.run(3, slow_on_the_first, ConfigError("a mistake"))
    assert str(raised.value).count("ConfigError: a mistake") == 3
