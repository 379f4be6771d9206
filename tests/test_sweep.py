"""Sweeps: names and checks of jobs, skipped, resumed and failed jobs, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gpt4d.config import ConfigError
from gpt4d.runs import lock
from gpt4d.runs.summary import Run, State
from gpt4d.runtime.launch import ArrayTask, Launch
from gpt4d.training import sweep
from tests.support.commands import TRAIN, launcher, overrides
from tests.support.run_files import event, locked_by_another_process, step, write_run
from tests.support.settings import configured


def test_jobs_are_named_by_their_values_and_the_names_are_safe_unique_and_short():
    assert sweep.job_name({"optim.lr": "0.001", "train.seed": "0"}) == "lr=0.001,seed=0"
    ambiguous = {"optim.name": "a", "data.name": "b", "train.seed": "0"}
    assert sweep.job_name(ambiguous) == "optim.name=a,data.name=b,seed=0"
    assert sweep.job_name({"model": "gpt_tiny"}) == "model=gpt_tiny"
    values = ["books/*.txt", "books/ .txt", "../../etc", "a=b", "a,b", "x" * 300, "x" * 300 + "y", "ü", ""]
    values.append("${oc.env:HOME}")
    names = [sweep.job_name({"data.path": value}) for value in values]
    assert len(set(names)) == len(values)
    assert all(len(name) <= 100 and not set(name) - set("=,-._+") - set(map(chr, range(48, 123))) for name in names)
    assert names[0].startswith("path=books-.txt-")


def test_combinations_are_hydras_in_its_order_with_a_directory_each():
    jobs = sweep.expand(["optim.lr=1e-3,4e-3", "train.steps=5", "train.seed=range(2)"], 1)
    assert [job.name for job in jobs] == [f"lr={lr},seed={seed}" for lr in (0.001, 0.004) for seed in (0, 1)]
    assert jobs[1].swept == ["optim.lr=0.001", "train.seed=1"]
    assert (jobs[1].config.train.seed, jobs[1].config.train.steps) == (1, 5)
    assert jobs[1].directory == Path("runs/llama_tiny-sotu/lr=0.001,seed=1")
    assert jobs[1].config.run.name == "llama_tiny-sotu/lr=0.001,seed=1"
    assert [job.config for job in jobs] == [configured(job.overrides) for job in jobs]


PROBLEMS = [  # arguments of a sweep, and the beginning of each line
    ("optim.lr=1e-3", "-m: no key has several values; write KEY=VALUE,VALUE or leave out -m"),
    ("train.seq_len=999,256 train.seed=0,1", "train.seq_len=999 train.seed=0 and 1 more: train.seq_len=999: longer"),
    ("train.sed=0,1", "train.sed: there is no such key; did you mean train.seed?"),
    ("optim.lr=1e-3,0.001", "optim.lr=0.001: the same run as optim.lr=0.001 (runs/llama_tiny-sotu/lr=0.001); leave"),
    ("model=gpt_tiny,llama_tiny", "run.dir=runs/gpt_tiny-sotu: another combination has runs/llama_tiny-sotu; set"),
    ("optim.lr=interval(0,1)", "BasicSweeper does not support sweep type"),
    (
        "optim.lr=1e-3,a train.seq_len=999",
        "optim.lr=0.001: train.seq_len=999: longer",
        "optim.lr=a: optim.lr: Value 'a'",
    ),
]


def test_every_problem_of_a_combination_is_one_line_before_the_first_job():
    for arguments, *problems in PROBLEMS:
        with pytest.raises(ConfigError) as raised:
            sweep.expand(arguments.split(), 1)
        lines = str(raised.value).split("\nerror: ")
        assert len(lines) == len(problems) and not any("\n" in line for line in lines), arguments
        assert all(map(str.startswith, lines, problems)), lines


def test_a_job_of_another_experiment_is_refused_before_the_first_job(tmp_path):
    arguments = ["train.seed=0,1", f"run.dir={tmp_path}"]
    job = sweep.expand(arguments, 1)[1]
    write_run(job.directory, event("start"), config="optim: {lr: 0.1}")
    (job.directory / "starts.jsonl").write_text(json.dumps({"config": "config.yaml"}) + "\n")
    with pytest.raises(ConfigError, match=rf"^train.seed=1: optim.lr=0.008: {job.directory} has 0.1"):
        sweep.expand(arguments, 1)


def test_options_of_hydra_show_the_first_combination():
    assert sweep.requested(["-m", "optim.lr=1,2"]) and sweep.requested(["optim.lr=1,2", "--multirun"])
    assert not sweep.requested(["optim.lr=1"]) and not sweep.requested(["-m", "--help"])
    shown = sweep.for_hydra(["--cfg", "job", "-m", "optim.lr=1,2", "train.seed=3", "--package=run.dir"])
    assert shown == ["optim.lr=1", "train.seed=3", "--cfg", "job", "--package=run.dir"]
    assert sweep.for_hydra(["optim.lr=1"]) == ["optim.lr=1"]


def test_ranks_of_consecutive_jobs_use_other_ports_unless_torchrun_has_the_store(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    launch = Launch(1, 2, master="nid001:20000")
    ports = [sweep.job_environment(launch, number)["MASTER_PORT"] for number in (1, 2, 3)]
    assert ports[0] == ports[2] != ports[1]
    monkeypatch.setenv("MASTER_PORT", "20000")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environment = sweep.job_environment(launch, 1)
    assert environment["MASTER_PORT"] == "20000"
    assert Launch.from_environment(environment).sweep_job == 1


# A job that writes the files of a run. Its first argument maps seeds to actions: refuse, stop, kill, late or end.
FAKE = """
import json, os, pathlib, signal, sys, time
values = dict(argument.split("=", 1) for argument in sys.argv[2:])
run, seed = pathlib.Path(values["run.dir"].strip('"')), values["train.seed"]
act = json.loads(sys.argv[1]).get(seed, "done")
line = {"step": 2, "tokens": 8, "time": 1.0, "elapsed_s": 1.0}
if act == "refuse":
    sys.exit(1)
if act == "stop":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getppid(), signal.SIGINT)
    signal.sigwait([signal.SIGTERM])
run.mkdir(parents=True, exist_ok=True)
(run / "config.yaml").write_text(f"{{train: {{steps: 2, seed: {seed}}}}}")
with open(run / "metrics.jsonl", "a") as file:
    for event in ("start", "validation", "signal" if act == "stop" else "done"):
        file.write(json.dumps(line | {"event": event, "loss": 3.0 + int(seed)}) + chr(10))
if act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "late":
    os.kill(os.getppid(), signal.SIGUSR1)
    signal.pause()
sys.exit(75 if act == "stop" else 0)
"""


def execute(tmp_path, task=None, **plan):
    jobs = sweep.expand(["train.seed=0,1,2", "train.steps=2", f"run.dir={tmp_path / 'sweep'}"], 1, task)
    sweep.execute(jobs, [sys.executable, "-c", FAKE, json.dumps(plan)], Launch(), task)
    return results(tmp_path)


def results(tmp_path):
    """Return job, state and exit code of each entry of sweep.json."""
    entries = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    return [(entry["job"], entry["state"], entry["exit_code"]) for entry in entries]


def test_a_failed_job_ends_neither_the_others_nor_its_next_attempt(tmp_path, capfd):
    expected = r"^2 of 3 jobs failed: seed=0 \(exit code 1\), seed=1 \(exit code -9\); run the same command to try them"
    with pytest.raises(ConfigError, match=expected):
        execute(tmp_path, **{"0": "refuse", "1": "kill"})
    assert [Run(tmp_path / f"sweep/seed={seed}").state for seed in (0, 1, 2)] == [State.NEW, *[State.FINISHED] * 2]
    (tmp_path / "sweep/seed=1/metrics.jsonl").write_text(json.dumps(event("start")) + "\n")
    assert results(tmp_path)[0] == ("seed=0", "failed", 1)
    capfd.readouterr()
    assert execute(tmp_path) == [("seed=0", "finished", 0), ("seed=1", "finished", 0), ("seed=2", "finished", 0)]
    out = capfd.readouterr().out
    assert "sweep of 3 jobs" in out and "1 of them finished" in out and "job 2 of 2: seed=1" in out
    assert "lowest validation loss: 3.0000, seed=0" in out


def test_a_signal_stops_the_job_and_the_sweep_and_the_next_call_resumes(tmp_path, capfd):
    with pytest.raises(SystemExit) as stopped:
        execute(tmp_path, **{"1": "stop"})
    assert stopped.value.code == 75
    assert "SIGINT: the sweep has stopped; run the same command to resume" in capfd.readouterr().out
    assert [row[1:] for row in results(tmp_path)] == [("finished", 0), ("interrupted", 75), ("new", None)]
    assert execute(tmp_path) == [(f"seed={seed}", "finished", 0) for seed in range(3)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_that_a_signal_to_the_sweep_kills_after_its_last_step_has_finished(tmp_path):
    with pytest.raises(SystemExit):
        execute(tmp_path, **{"1": "late"})
    assert [row[1:] for row in results(tmp_path)] == [("finished", 0), ("finished", 0), ("new", None)]


def test_tasks_of_an_array_share_the_jobs_and_the_last_one_reports_them_all(tmp_path, capfd):
    first, second = ArrayTask(4, 0, 2), ArrayTask(5, 1, 2)
    assert execute(tmp_path, second) == [("seed=0", "new", None), ("seed=1", "finished", 0), ("seed=2", "new", None)]
    with pytest.raises(ConfigError, match=r"^1 of 2 jobs failed: seed=2 \(exit code 1\)"):
        execute(tmp_path, first, **{"2": "refuse"})
    assert results(tmp_path) == [("seed=0", "finished", 0), ("seed=1", "finished", 0), ("seed=2", "failed", 1)]
    capfd.readouterr()
    execute(tmp_path, second)
    out = capfd.readouterr().out
    assert "array task 5: 1 of 3 jobs in" in out and "1 of them finished" in out and "job 1" not in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("seed=")]
    assert [(row[0], row[2]) for row in rows if len(row) > 2][:2] == [("seed=0", "finished"), ("seed=1", "finished")]
    assert results(tmp_path)[2] == ("seed=2", "failed", 1), "the exit code of another task's job is lost"


def test_one_task_at_a_time_reads_the_runs_and_writes_the_results(tmp_path, monkeypatch):
    jobs, states = sweep.expand(["train.seed=0,1", f"run.dir={tmp_path}"], 1), []
    check = "import sys; from gpt4d.runs.lock import *; print(is_locked(Path(sys.argv[1]), 'report.lock'))"

    def write_while_another_process_looks(path, content):
        command = [sys.executable, "-c", check, str(tmp_path)]
        states.append(subprocess.run(command, capture_output=True, text=True).stdout)

    monkeypatch.setattr(sweep, "replace_file", write_while_another_process_looks)
    with pytest.raises(ConfigError, match="1 of 1 jobs failed"):
        sweep.execute(jobs, ["false"], Launch(), ArrayTask(0, 0, 2))
    assert states == ["True\n", "True\n"]
    assert not lock.is_locked(tmp_path, "report.lock")


def test_a_task_without_jobs_reports_that_in_one_line(tmp_path, capfd):
    jobs = sweep.expand(["train.seed=0,1", f"run.dir={tmp_path / 'sweep'}"], 1)
    sweep.execute(jobs, ["false"], Launch(), ArrayTask(2, 2, 3))
    assert capfd.readouterr().out == "array task 2: 0 of 2 jobs; nothing to do, because the array has 3 tasks\n"
    assert not (tmp_path / "sweep").exists()


def test_a_task_checks_the_directories_of_its_own_jobs_only(tmp_path):
    arguments = ["train.seed=0,1", f"run.dir={tmp_path}"]
    with locked_by_another_process(sweep.expand(arguments, 1)[1].directory):
        assert len(sweep.expand(arguments, 1, ArrayTask(0, 0, 2))) == 2
        with pytest.raises(ConfigError, match=r"^train.seed=1: run.dir=.*seed=1: another run"):
            sweep.expand(arguments, 1, ArrayTask(1, 1, 2))


SWEEP = """
import sys
from gpt4d.training import sweep
from gpt4d.runtime.launch import Launch
jobs = sweep.expand(["train.seed=0,1", f"run.dir={sys.argv[1]}"], 1)
job = "from gpt4d.training import sweep; import time; sweep.end_with_sweep(); print('job', flush=True); time.sleep(999)"
sweep.execute(jobs, [sys.executable, "-c", job], Launch())
"""


@pytest.mark.slow
def test_a_job_ends_when_its_sweep_is_killed(tmp_path):
    command = [sys.executable, "-c", SWEEP, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while process.stdout.readline() != "job\n":
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)  # returns once the job has closed standard output, too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("key", "value", "longer"), [("steps", 2, 3), ("epochs", 0.5, 1.0)])
def test_a_longer_sweep_continues_finished_jobs_whatever_number_of_steps_they_took(tmp_path, key, value, longer):
    jobs = sweep.expand(["train.seed=0,1", f"train.{key}={value}", f"run.dir={tmp_path}"], 1)
    length = "" if key == "steps" else f"train: {{steps: 2, epochs: {value}}}"
    write_run(jobs[0].directory, event("start"), step(2), event("done", 2), config=length)
    assert jobs[0].is_finished() and not jobs[1].is_finished()
    setattr(jobs[0].config.train, key, longer)
    assert not jobs[0].is_finished()


def test_tasks_of_an_array_share_a_directory_which_a_sweep_shares_with_nobody(tmp_path):
    jobs = sweep.expand(["train.seed=0,1", f"run.dir={tmp_path}"], 1)
    for shared in ([], ["shared"]):  # another sweep, or another array
        with locked_by_another_process(tmp_path, lock.SWEEP_LOCK, *shared) as process:
            refused = f"another sweep .*, pid {process.pid}, .* is using it"
            for task in (None, ArrayTask(1, 1, 2)):
                with pytest.raises(ConfigError, match="1 of 1 jobs failed" if shared and task else refused):
                    sweep.execute(jobs, ["false"], Launch(), task)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rates"), [(1, "4e-3"), (1, "1e-3,4e-3"), (2, "4e-3")])
def test_a_sweep_is_interrupted_and_resumed_with_and_without_torchrun(tiny, tmp_path, world_size, rates):
    changed = ["train.steps=30", f"optim.lr={rates}", "train.seed=0,1", f"run.dir={tmp_path / 'sweep'}"]
    arguments = ["-m", *overrides(tiny()), *changed, f"parallel.gx={world_size}"]
    jobs = sweep.expand(arguments[1:], world_size)
    command = [sys.executable, *(launcher(2) if world_size == 2 else [TRAIN]), *arguments]
    logs = [job.directory / "metrics.jsonl" for job in jobs]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (logs[1].exists() and '"loss"' in logs[1].read_text()):
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 75 if world_size == 1 else process.returncode != 0
    assert [Run(job.directory).state for job in jobs[:2]] == [State.FINISHED, State.INTERRUPTED]
    first = logs[0].read_bytes()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert logs[0].read_bytes() == first, "a finished job was started again"
    for job in jobs:
        run = Run(job.directory)
        assert (run.state, list(run.history.training)) == (State.FINISHED, list(range(1, 31)))
    assert len((jobs[1].directory / "starts.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "sweep/sweep.png").stat().st_size > 0
    assert not Path("multirun").exists() and not list(tmp_path.rglob(".hydra"))
