"""One run through all that befalls a job, under a real Slurm: its losses are those of a run that nothing befell."""

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

from gpt4d.checkpoint import __main__ as commands
from gpt4d.checkpoint import checkpoint_dir
from tests.slurm.cluster import ROOT
from tests.test_front_door import overrides

PROMPT = 'it\'s "{said}" = $HOME, #1'


def lines(run: Path) -> list[dict]:
    """Of metrics.jsonl; the last may be half written."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def trained(run: Path, start: int) -> int:
    """How many steps the ``start``-th start of a run has made, resumed where the one before saved."""
    starts = [[]]
    for line in lines(run):
        if line.get("event") == "resume":
            starts.append([])
        elif "event" not in line:
            starts[-1].append(line["step"])
    return len(starts[start]) if start < len(starts) else 0


def numbers(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step; AssertionError if a step that was made twice differed."""
    found = {}
    for line in lines(run):
        if "event" not in line:
            now = (line["loss"], line["grad_norm"])
            assert found.setdefault(line["step"], now) == now, f"step {line['step']}"
    return found


def test_warned_preempted_off_a_dead_node_and_cancelled_a_run_has_the_losses_of_one_left_alone(
    limited, cluster, tiny, tmp_path
):
    run, alone = tmp_path / "run", tmp_path / "alone"
    # More steps than it will make: it ends when the test has it end, and its schedule does not depend on that.
    settings = tiny("train.steps=1000000", "optim.schedule_steps=300", "checkpoint.every=50", "checkpoint.keep=2")
    words = overrides(settings)
    # One host in place of many: node names of this Slurm resolve nowhere.
    environment = {"GPT4D_VENV": sys.prefix, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    job = cluster.sbatch(
        "--nodelist=node1,node2", "--nodes=2", "--time=60", str(ROOT / "scripts/slurm/generic.sh"),
        *words, f"run.dir={run}", "parallel.gz=2", f"logging.sample_prompt={json.dumps(PROMPT)}",
        log=tmp_path / "log", environment=environment,
    )  # fmt: skip

    def under_way(start: int) -> None:
        job.until(lambda: trained(run, start) >= 3 or job.show().get("JobState") == "FAILED", f"start {start} trains")
        assert job.show()["JobState"] == "RUNNING", job.told()

    under_way(0)
    written = OmegaConf.load(run / "config.yaml")
    assert (written.logging.sample_prompt, written.parallel.gz) == (PROMPT, 2)
    job.signal_batch("USR1")
    job.until_restarted(1)

    under_way(1)
    urgent = ["--partition=urgent", "--nodelist=node1,node2", "--exclusive", "--wrap=true"]
    cluster.sbatch(*urgent, log=tmp_path / "urgent").until_state("COMPLETED")
    job.until_restarted(2)

    under_way(2)
    cluster.tell("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    job.until(lambda: job.show().get("Restarts") == "3", "3 restarts")
    cluster.ask("scontrol", "update", "NodeName=node2", "State=RESUME")  # refused if it has come back by itself
    job.until_restarted(3)

    under_way(3)
    job.cancel()
    assert job.until_state("CANCELLED")["Restarts"] == "3"

    said = [line for line in lines(run) if "event" in line]
    assert [line["signal"] for line in said if line["event"] == "signal"][:2] == ["SIGUSR1", "SIGTERM"]
    assert "USR1: saved, and back in the queue" in job.said() and "ended from outside" in job.said()
    newest = checkpoint_dir.committed(run)[-1]
    commands.main(["verify", f"checkpoint={newest}"])

    job = cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--account=m0000", "--constraint=gpu&gpu",
        str(ROOT / "scripts/slurm/perlmutter.sh"), *words, f"run.dir={alone}", "parallel.gz=2",
        f"train.steps={max(numbers(run))}", log=tmp_path / "alone.log", environment=environment,
    )  # fmt: skip
    assert job.until_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.said()
    assert numbers(run) == numbers(alone)
