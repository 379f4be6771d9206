"""What the batch scripts decide, under a real Slurm; a stand-in takes train.py's place."""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.conftest import standing_in

SCRIPTS = ROOT / "scripts" / "slurm"
AWKWARD = ["a=b c", "said='\"it\"'", "blend={x: 0.5, 'y z': 0.5}", "glob=*.txt", "$HOME=$(date)", "", "back\\", "--"]


@pytest.fixture
def stand_in(tmp_path):
    return functools.partial(standing_in, tmp_path)


def seen(directory: Path, start: int = 0) -> list[dict]:
    """What each rank of a start was given, in their order."""
    files = sorted(directory.glob(f"start{start}.rank*.json"), key=lambda path: int(path.suffixes[-2][5:]))
    return [json.loads(path.read_text()) for path in files]


def test_the_scripts_pass_on_every_word_and_lay_ranks_out_by_nodes(cluster, stand_in, tmp_path):
    """All three, with their own options, and without modules."""
    jobs = {}
    for name, tasks in (("generic", 4), ("perlmutter", 4), ("frontier", 8)):
        environment, directory = stand_in("0", name=name)
        words = ["--nodes=2", "--account=m0000", f"--ntasks-per-node={tasks}", str(SCRIPTS / f"{name}.sh"), *AWKWARD]
        log = tmp_path / f"{name}.log"
        if name == "perlmutter":  # a word of one's own for what a script sets stays
            environment["FI_CXI_DEFAULT_CQ_SIZE"] = "7"
        # From another directory: the repository is where GPT4D_HOME says.
        environment["GPT4D_HOME"] = str(ROOT)
        jobs[name] = cluster.sbatch(*words, log=log, environment=environment, cwd=tmp_path), directory, tasks

    environments = {}
    for name, (job, directory, tasks) in jobs.items():
        assert job.until_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.said()
        ranks = seen(directory)
        assert [rank["words"] for rank in ranks] == [AWKWARD] * 2 * tasks
        assert {rank["program"] for rank in ranks} == {"train.py"}
        assert [rank["environment"]["SLURM_NODEID"] for rank in ranks] == ["0"] * tasks + ["1"] * tasks
        assert not list(tmp_path.glob("slurm-*.out"))
        environments[name] = ranks[0]["environment"]
    assert environments["generic"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environments["perlmutter"]["FI_CXI_DEFAULT_CQ_SIZE"] == "7"
    assert environments["perlmutter"]["NCCL_SOCKET_IFNAME"] == "hsn"
    assert "going on without nccl" in jobs["perlmutter"][0].said()
    assert environments["frontier"]["MIOPEN_USER_DB_PATH"].startswith("/tmp/")


def test_the_warning_of_the_time_limit_puts_a_job_back_into_the_queue(limited):
    job, directory = limited
    job.until_restarted(1)
    job.until_state("COMPLETED")
    assert "USR1: saved, and back in the queue" in job.said()
    assert "start 2" in job.said() and "start 1" in job.said(), "one log for both starts"
    assert len(seen(directory, 1)) == 1


def test_which_ends_put_a_job_back_into_the_queue(cluster, stand_in, tmp_path):
    """Not that of a run that failed, nor scancel; but that of one ended by the signal before it listened."""
    jobs, directories = {}, {}
    for name, *plan in (("failed", "3"), ("cancelled", "listen"), ("deaf", "deaf", "0")):
        environment, directories[name] = stand_in(*plan, name=name)
        jobs[name] = cluster.sbatch(str(SCRIPTS / "generic.sh"), log=tmp_path / f"{name}.log", environment=environment)
    deaf, cancelled = jobs["deaf"], jobs["cancelled"]

    deaf.until(lambda: seen(directories["deaf"]), "its task runs")
    deaf.signal_batch("TERM")
    cancelled.until(lambda: seen(directories["cancelled"]), "its task runs")
    cancelled.cancel()
    deaf.until_restarted(1)
    deaf.until_state("COMPLETED")

    assert cancelled.until_state("CANCELLED")["Restarts"] == "0"
    assert "ended from outside" in cancelled.said()
    shown = jobs["failed"].until_state("FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("3:0", "0")


def test_a_module_that_exists_is_loaded_and_one_that_fails_does_not_end_the_job():
    # No job: what common.sh defines, in a shell in which it finds one.
    words = 'module() { echo "module $*"; [ "$2" != broken ]; }; load nccl; load broken'
    done = sourced(words)
    assert done.stdout.splitlines() == ["module load nccl", "module load broken"]
    assert "module load broken failed" in done.stderr


def test_a_run_that_comes_no_further_is_requeued_three_times(stand_in):
    environment, directory = stand_in("75")

    def requeues() -> bool:
        return sourced("note_progress run.name=a", environment).returncode == 0

    assert [requeues() for _ in range(4)] == [True, True, True, False]
    for step in (90, 100, 110):
        (directory / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        assert requeues(), "a new checkpoint begins the count again"
    (directory / "checkpoints" / "step_00000120.partial").mkdir()
    assert [requeues() for _ in range(3)] == [True, True, False]
    # A job of its own begins its own count.
    assert sourced("note_progress", {**environment, "SLURM_JOB_ID": "8"}).returncode == 0


def test_what_is_missing_is_said_in_one_line(tmp_path):
    script, bare = SCRIPTS / "generic.sh", {"PATH": os.environ["PATH"]}
    for words, environment, cwd in (
        ("start it with sbatch", {}, ROOT),
        ("call sbatch in the repository, or set GPT4D_HOME", {"SLURM_JOB_ID": "7"}, tmp_path),
        (f"there is no {tmp_path}/bin/python", {"SLURM_JOB_ID": "7", "GPT4D_VENV": str(tmp_path)}, ROOT),
    ):
        done = subprocess.run(
            ["bash", script], cwd=cwd, env={**bare, **environment}, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1]


def sourced(words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """What a shell does with ``words`` once it has common.sh."""
    full = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **(environment or {})}
    command = ["bash", "-c", f". scripts/slurm/common.sh; {words}"]
    return subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=30)
