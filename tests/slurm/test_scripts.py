"""The decisions of the batch scripts under a real Slurm, with a stand-in for train.py."""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, SlurmJob
from tests.slurm.conftest import create_stand_in

SCRIPTS = ROOT / "scripts" / "slurm"
AWKWARD = ["a=b c", "said='\"it\"'", "blend={x: 0.5, 'y z': 0.5}", "glob=*.txt", "$HOME=$(date)", "", "back\\", "--"]

pytestmark = pytest.mark.slow


@pytest.fixture
def stand_in(tmp_path):
    return functools.partial(create_stand_in, tmp_path)


def received(directory: Path, start: int = 0) -> list[dict]:
    """Return the messages that the ranks of a start received, in rank order."""
    files = sorted(directory.glob(f"start{start}.rank*.json"), key=lambda path: int(path.suffixes[-2][5:]))
    return [json.loads(path.read_text()) for path in files]


def test_scripts_pass_all_overrides_and_place_consecutive_ranks_on_a_node(cluster, stand_in, tmp_path):
    """All three scripts, with their own options, and without modules."""
    jobs = {}
    for name, tasks in (("generic", 4), ("perlmutter", 4), ("frontier", 8)):
        environment, directory = stand_in("0", name=name)
        options = ["--nodes=2", "--account=m0000", f"--ntasks-per-node={tasks}"]
        arguments = [*options, str(SCRIPTS / f"{name}.sh"), *AWKWARD]
        log = tmp_path / f"{name}.log"
        if name == "perlmutter":  # the user's value takes precedence over the script's
            environment["FI_CXI_DEFAULT_CQ_SIZE"] = "7"
        # Submitted from another directory: GPT4D_HOME is the repository.
        environment["GPT4D_HOME"] = str(ROOT)
        jobs[name] = cluster.sbatch(*arguments, log=log, environment=environment, cwd=tmp_path), directory, tasks

    environments = {}
    for name, (job, directory, tasks) in jobs.items():
        assert job.wait_for_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.output()
        ranks = received(directory)
        own = [] if name == "generic" else [f"cluster={name}"]
        assert [rank["overrides"] for rank in ranks] == [own + AWKWARD] * 2 * tasks
        assert {rank["program"] for rank in ranks} == {"train.py"}
        assert [rank["environment"]["SLURM_NODEID"] for rank in ranks] == ["0"] * tasks + ["1"] * tasks
        assert not list(tmp_path.glob("slurm-*.out"))
        environments[name] = ranks[0]["environment"]
    assert environments["perlmutter"]["FI_CXI_DEFAULT_CQ_SIZE"] == "7"
    assert environments["perlmutter"]["NCCL_SOCKET_IFNAME"] == "hsn"
    assert "continuing without nccl" in jobs["perlmutter"][0].output()


@pytest.mark.full
def test_the_warning_before_the_time_limit_requeues_a_job(cluster, stand_in, tmp_path):
    """The job has less time than the warning needs. Slurm checks limits twice a minute."""
    environment, directory = stand_in("listen", "0")
    job = cluster.sbatch("--time=5", str(SCRIPTS / "generic.sh"), log=tmp_path / "log", environment=environment)
    job.wait_for_restart(1)
    job.wait_for_state("COMPLETED")
    assert "USR1: saved and requeued" in job.output()
    assert "start 2" in job.output() and "start 1" in job.output(), "both starts must write to one log"
    assert len(received(directory, 1)) == 1


def test_only_a_stop_signal_requeues_a_job(cluster, stand_in, tmp_path):
    """A failure and scancel do not; a signal that ends the run before it can handle signals does."""
    jobs, directories = {}, {}
    for name, *plan in (("failed", "3"), ("canceled", "listen"), ("deaf", "deaf", "0")):
        environment, directories[name] = stand_in(*plan, name=name)
        jobs[name] = cluster.sbatch(str(SCRIPTS / "generic.sh"), log=tmp_path / f"{name}.log", environment=environment)
    deaf, canceled = jobs["deaf"], jobs["canceled"]

    deaf.wait_until(lambda: received(directories["deaf"]), "its task runs")
    deaf.signal_batch("TERM")
    canceled.wait_until(lambda: received(directories["canceled"]), "its task runs")
    canceled.cancel()
    deaf.wait_for_restart(1)
    deaf.wait_for_state("COMPLETED")

    assert canceled.wait_for_state("CANCELLED")["Restarts"] == "0"
    assert "ended from outside" in canceled.output()
    shown = jobs["failed"].wait_for_state("FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("3:0", "0")


@pytest.mark.full
def test_a_signal_to_one_task_of_an_array_requeues_that_task_only(cluster, stand_in, tmp_path):
    """The task whose job number is the number of the array, which also names all tasks of the array."""
    environment, directory = stand_in("listen", "0")
    script = str(SCRIPTS / "generic.sh")
    array = cluster.sbatch("--array=0-1", script, log=tmp_path / "%a.log", environment=environment)
    tasks = [SlurmJob(cluster, f"{array.number}_{index}", tmp_path / f"{index}.log") for index in (0, 1)]
    for index, task in enumerate(tasks):
        task.wait_until(lambda index=index: received(directory / str(index)), "it runs")
    tasks.sort(key=lambda task: task.show()["JobId"] == array.number)
    other, namesake = tasks
    namesake.signal_batch("USR1")
    namesake.wait_for_restart(1)
    namesake.wait_for_state("COMPLETED")
    shown = other.show()
    other.cancel()
    assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    assert "USR1: saved and requeued" in namesake.output() and "requeued" not in other.output()


def test_modules_are_loaded_and_a_failing_one_does_not_end_the_job():
    script = 'module() { echo "module $*"; [ "$2" != broken ]; }; load_modules nccl; load_modules broken'
    result = run_with_common(script)
    assert result.stdout.splitlines() == ["module load nccl", "module load broken"]
    assert "module load broken failed" in result.stderr


def test_a_run_without_progress_is_requeued_three_times(stand_in):
    environment, directory = stand_in("75")

    def requeues() -> bool:
        return run_with_common("record_progress run.name=a", environment).returncode == 0

    assert [requeues() for _ in range(4)] == [True, True, True, False]
    for step in (90, 100, 110):
        (directory / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        assert requeues(), "a new checkpoint must restart the count"
    (directory / "lr=0.1" / "checkpoints" / "step_00000020").mkdir(parents=True)
    assert requeues(), "a new checkpoint of a sweep's job must restart the count"
    (directory / "checkpoints" / "step_00000120.partial").mkdir()
    assert [requeues() for _ in range(3)] == [True, True, False]
    # Another job starts its own count.
    assert run_with_common("record_progress", {**environment, "SLURM_JOB_ID": "8"}).returncode == 0
    # So does each task of an array, although the tasks of a sweep share run.dir.
    tasks = [{"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": str(task)} for task in (0, 1)]
    for requeue in range(4):
        results = [run_with_common("record_progress", environment | task).returncode for task in tasks]
        assert results == [int(requeue == 3)] * 2


def test_missing_prerequisites_are_reported_in_one_line(tmp_path):
    script, bare = SCRIPTS / "generic.sh", {"PATH": os.environ["PATH"]}
    for message, environment, cwd in (
        ("start it with sbatch", {}, ROOT),
        ("call sbatch there, or set GPT4D_HOME", {"SLURM_JOB_ID": "7"}, tmp_path),
        (f"there is no {tmp_path}/bin/python", {"SLURM_JOB_ID": "7", "GPT4D_VENV": str(tmp_path)}, ROOT),
    ):
        result = subprocess.run(
            ["bash", script], cwd=cwd, env={**bare, **environment}, capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 1 and message in result.stderr.splitlines()[-1]


def run_with_common(script: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run ``script`` in a shell that has sourced common.sh, as in a job."""
    full = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **(environment or {})}
    command = ["bash", "-c", f". scripts/slurm/common.sh; {script}"]
    return subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=30)
