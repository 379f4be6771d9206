"""Rank and world size from the variables of launchers."""

import pytest

from gpt4d.config import ConfigError
from gpt4d.runtime.launch import ArrayTask, Launch
from gpt4d.sweep import job_environment

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


def test_without_a_launcher_the_world_size_is_one():
    assert Launch.from_environment({}) == Launch()


def test_torchrun_variables():
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    assert Launch.from_environment(env) == Launch(5, 8, 1, 4, "h:9", start="a.1")


def test_slurm_step_variables():
    launch = Launch.from_environment(SLURM_STEP)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (9, 12, 1, 4)
    host, port = launch.master.split(":")
    assert host == "nid001003" and 20000 <= int(port) < 32000


def test_each_start_of_a_slurm_job_has_a_name_and_a_port_of_its_own():
    starts = [Launch.from_environment({**SLURM_STEP, "SLURM_RESTART_COUNT": str(restart)}) for restart in range(1, 4)]
    starts.append(Launch.from_environment(SLURM_STEP))
    assert [launch.start for launch in starts] == ["71.0.1", "71.0.2", "71.0.3", "71.0.0"]
    assert len({launch.master for launch in starts}) == 4


# Recorded in Slurm 22.05: task 3 of `sbatch --array=2-4`, whose tasks have job numbers 80, 81 and 79.
ARRAY_TASK = {
    "SLURM_ARRAY_JOB_ID": "79",
    "SLURM_ARRAY_TASK_COUNT": "3",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_MAX": "4",
    "SLURM_ARRAY_TASK_MIN": "2",
    "SLURM_ARRAY_TASK_STEP": "1",
    "SLURM_JOB_ID": "81",
}


def test_the_tasks_of_an_array_take_each_job_once():
    assert ArrayTask.from_environment({"SLURM_JOB_ID": "81"}) is None
    tasks = [ArrayTask.from_environment({**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": str(number)}) for number in (2, 3, 4)]
    assert [[job for job in range(7) if task.takes(job)] for task in tasks] == [[0, 3, 6], [1, 4], [2, 5]]


def test_an_array_with_gaps_is_one_line():
    with pytest.raises(ConfigError, match=r"^--array: 2 task ids from 2 to 4 have gaps; use --array=0-1, whose"):
        ArrayTask.from_environment({**ARRAY_TASK, "SLURM_ARRAY_TASK_COUNT": "2"})


def test_tasks_of_an_array_on_one_node_have_different_ports_whichever_job_of_the_sweep_they_train(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    ports = [
        job_environment(Launch.from_environment({**SLURM_STEP, "SLURM_JOB_ID": str(job)}), number)["MASTER_PORT"]
        for job in range(79, 79 + 128)
        for number in (1, 2)
    ]
    assert len(set(ports)) == len(ports)


def test_in_a_batch_script_without_srun_the_world_size_is_one():
    """There SLURM_NTASKS is set although srun has not started any tasks."""
    assert Launch.from_environment({"SLURM_JOB_ID": "71", "SLURM_NTASKS": "12", "SLURM_PROCID": "0"}) == Launch()
