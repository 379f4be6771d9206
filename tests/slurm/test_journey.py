"""Under a real Slurm, a run that is interrupted in every way has the losses of an uninterrupted run."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gpt4d.checkpoint import __main__ as commands
from gpt4d.checkpoint import checkpoint_dir
from gpt4d.runtime.launch import Launch
from tests.slurm.cluster import ROOT, SlurmJob
from tests.support.commands import overrides
from tests.support.grids import full, train_in_rank
from tests.support.jobs import SLURM_STEP

PROMPT = 'it\'s "{said}" = $HOME, #1'

pytestmark = pytest.mark.slow


def metric_lines(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, without the last one if it is incomplete."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps_of_start(run: Path, start: int) -> int:
    """Return the number of steps since start number ``start`` (from 0) of a run."""
    starts = [[]]
    for line in metric_lines(run):
        if line.get("event") == "resume":
            starts.append([])
        elif "event" not in line:
            starts[-1].append(line["step"])
    return len(starts[start]) if start < len(starts) else 0


def losses_and_norms(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm of each step. Raises AssertionError if a repeated step differs."""
    by_step = {}
    for line in metric_lines(run):
        if "event" not in line:
            values = (line["loss"], line["grad_norm"])
            assert by_step.setdefault(line["step"], values) == values, f"step {line['step']}"
    return by_step


def submit(cluster, log: Path, *arguments: str, options: Sequence[str] = ("--nodes=2",), script: str = "generic"):
    """Submit a job. All nodes are on this host, because the node names of this Slurm cannot be resolved."""
    environment = {"GPT4D_VENV": sys.prefix, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    path = str(ROOT / f"scripts/slurm/{script}.sh")
    return cluster.sbatch(*options, path, *arguments, log=log, environment=environment)


def node_is_clear(cluster, node: str, run: Path) -> bool:
    """Return whether no rank of a run is left on this host, and Slurm is not ending a job on the node."""
    ranks = subprocess.run(["pgrep", "-f", f"train.py.*run.dir={run}"], capture_output=True).returncode == 0
    state = cluster.query("scontrol", "show", "node", node)
    return bool(state) and "COMPLETING" not in state and not ranks


def warn(job, cluster, directory: Path) -> None:
    """Send the warning that precedes the time limit."""
    job.signal_batch("USR1")


def preempt(job, cluster, directory: Path) -> None:
    """Run an urgent job on the nodes of ``job``."""
    urgent = ["--partition=urgent", "--nodelist=node1,node2", "--exclusive", "--wrap=true"]
    cluster.sbatch(*urgent, log=directory / "urgent").wait_for_state("COMPLETED")


def lose_a_node(job, cluster, directory: Path) -> None:
    """Take a node down, and bring it back once Slurm has requeued ``job``."""
    restarts = int(job.show()["Restarts"]) + 1
    cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    job.wait_until(lambda: job.show().get("Restarts") == str(restarts), f"{restarts} restarts")
    # Slurm may still be ending the lost step, and the next start has the same number.
    job.wait_until(lambda: node_is_clear(cluster, "node2", directory / "run"), "node2 is clear of the lost step")
    cluster.query("scontrol", "update", "NodeName=node2", "State=RESUME")  # rejected if the node has returned by itself


@pytest.mark.parametrize("interruptions", [(warn,), full((warn, preempt, lose_a_node))], ids=len)
def test_an_interrupted_run_has_the_losses_of_an_uninterrupted_one(cluster, ranks, tiny, tmp_path, interruptions):
    """The run is interrupted, and then canceled. In the long variant, Slurm also starts the uninterrupted run."""
    run, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    # More steps than the run will take: the test ends it. The schedule does not depend on the number of steps.
    settings = tiny("train.steps=1000000", "optim.schedule_steps=300", "checkpoint.every=50", "checkpoint.keep=2")
    arguments = overrides(settings)
    more = f"run.dir={run}", "parallel.gz=2", f"logging.sample_prompt={json.dumps(PROMPT)}", "logging.sample_tokens=8"
    options = "--nodelist=node1,node2", "--nodes=2", "--time=60"
    job = submit(cluster, tmp_path / "log", *arguments, *more, options=options)

    def wait_for_training(start: int) -> None:
        def trains_or_failed() -> bool:
            return steps_of_start(run, start) >= 3 or job.show().get("JobState") == "FAILED"

        job.wait_until(trains_or_failed, f"start {start} trains")
        assert job.show()["JobState"] == "RUNNING", job.diagnostics()

    wait_for_training(0)
    written = OmegaConf.load(run / "config.yaml")
    assert (written.logging.sample_prompt, written.parallel.gz) == (PROMPT, 2)
    for restart, interrupt in enumerate(interruptions, start=1):
        interrupt(job, cluster, tmp_path)
        job.wait_for_restart(restart)
        wait_for_training(restart)
    job.cancel()
    assert job.wait_for_state("CANCELLED")["Restarts"] == str(len(interruptions))

    events = [line for line in metric_lines(run) if "event" in line]
    signals = [line["signal"] for line in events if line["event"] == "signal"]
    # A cancellation or preemption reaches the ranks as TERM from Slurm and as USR1 from the script.
    assert signals[0] == "SIGUSR1" and len(signals) >= 2
    assert "USR1: saved and requeued" in job.output() and "ended from outside" in job.output()
    newest = checkpoint_dir.committed(run)[-1]
    commands.main(["verify", f"checkpoint={newest}"])

    more = [f"run.dir={uninterrupted}", "parallel.gz=2", f"train.steps={max(losses_and_norms(run))}"]
    if len(interruptions) == 1:
        ranks.run(2, train_in_rank, tiny("optim.schedule_steps=300", "checkpoint.every=50", "checkpoint.keep=2", *more))
    else:
        options = "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--account=m0000", "--constraint=gpu&gpu"
        log = tmp_path / "uninterrupted.log"
        job = submit(cluster, log, *arguments, *more, options=options, script="perlmutter")
        assert job.wait_for_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.output()
    assert losses_and_norms(run) == losses_and_norms(uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize(
    "starts",
    [
        {
            10: ("DeviceMesh(2, ", ["parallel.mode=atp", "parallel.d1=2", "parallel.d2=1"]),
            20: ("DeviceMesh(1, ", ["parallel.mode=atp", "parallel.d2=2", "parallel.chunks=2"]),
        },
        {
            10: ("grid 1x1x1x1 + 1x1x1x1 (", ["parallel.pipeline.stages=2", "parallel.pipeline.microbatches=2"]),
            20: ("grid 1x1x1x2 (", []),
        },
    ],
    ids=["from an ATP mesh to another", "from two stages to one"],
)
def test_a_run_continues_on_other_ranks_in_another_way(cluster, tiny, tmp_path, starts):
    run = tmp_path / "run"
    arguments = [*overrides(tiny("checkpoint.every=5")), f"run.dir={run}"]
    for steps, (line, settings) in starts.items():
        job = submit(cluster, tmp_path / f"log{steps}", *arguments, *settings, f"train.steps={steps}")
        assert job.wait_for_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.output()
        assert line in job.output()
    assert list(losses_and_norms(run)) == list(range(1, 21))
    assert [line["event"] for line in metric_lines(run) if "event" in line].count("resume") == 1


@pytest.mark.full
def test_the_tasks_of_an_array_train_a_sweep_and_one_is_interrupted(cluster, tiny, tmp_path):
    """Three tasks share one node and two jobs. Each job has two ranks."""
    sweep, options = tmp_path / "sweep", ("--array=0-2", "--nodelist=node3", "--ntasks-per-node=2")
    words = f"run.dir={sweep}", "parallel.gx=2", "optim.schedule_steps=300", "train.seed=0,1", "train.steps=200"
    arguments = "-m", *overrides(tiny("checkpoint.every=1000000")), *words
    array = submit(cluster, tmp_path / "%a.log", *arguments, options=options)
    tasks = [SlurmJob(cluster, f"{array.number}_{index}", tmp_path / f"{index}.log") for index in range(3)]
    runs = [sweep / f"seed={seed}" for seed in (0, 1)]
    for task, run in zip(tasks, runs, strict=False):
        task.wait_until(lambda run=run: steps_of_start(run, 0) >= 3, "its job trains")
    tasks[1].signal_batch("USR1")
    tasks[1].wait_for_restart(1)
    for task in tasks:
        assert task.wait_for_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", task.output()
    restarts = [task.show()["Restarts"] for task in tasks]
    assert restarts == ["0", "1", "0"]
    assert "array task 2: 0 of 2 jobs; nothing to do" in tasks[2].output()
    assert [list(losses_and_norms(run)) for run in runs] == [list(range(1, 201))] * 2
    entries = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [(entry["state"], entry["exit_code"]) for entry in entries] == [("finished", 0)] * 2
    assert (sweep / "sweep.png").stat().st_size > 0


@pytest.mark.full
def test_a_job_whose_port_is_taken_is_requeued_and_takes_another(cluster, tiny, tmp_path):
    arguments = *overrides(tiny()), "train.steps=3", "parallel.gz=2", f"run.dir={tmp_path / 'run'}"
    job = submit(cluster, tmp_path / "log", *arguments, options=("--hold", "--nodes=2"))
    master = Launch.from_environment({**SLURM_STEP, "SLURM_JOB_ID": job.number, "MASTER_ADDR": "127.0.0.1"}).master
    port = int(master.partition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        cluster.run("scontrol", "release", job.number)
        message = f"error: MASTER_PORT={port}: another process uses this port"
        job.wait_until(lambda: message in job.output(), message)
        job.wait_for_restart(1)
        assert job.wait_for_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.output()
    assert len(losses_and_norms(tmp_path / "run")) == 3
