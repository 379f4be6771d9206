"""The command that checks a GPU machine: its rehearsal passes, and whatever goes wrong in a check fails that check."""

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.check import Check, CheckContext, Outcome, Unavailable
from benchmarks.gpu_check import FAIL, NOT_REACHED, PARTS, PASS, Results, run_part
from gpt4d.config import ConfigError

_REPOSITORY = Path(__file__).resolve().parents[2]
MACHINE = {"device": "cpu", "machine": {}, "fingerprint": "one"}


@pytest.mark.full
def test_a_rehearsal_runs_all_checks_on_the_cpu(tmp_path):
    out = tmp_path / "results" / "rehearsal.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "device=cpu", f"out={out}"]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == list(range(12))
    assert all(line.endswith("  pass") for line in lines[:-1])
    written = json.loads(out.read_text())
    assert list(written["checks"]) == [str(number) for number in range(12)]
    assert all(entry["status"] == PASS and entry["rehearsal"] for entry in written["checks"].values())
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def succeed(context: CheckContext) -> Outcome:
    return Outcome("fine", {"earlier": sorted(context.earlier)})


def fail(_) -> Outcome:
    raise ValueError("the GPU\nis on fire")


def find_a_problem(_) -> Outcome:
    outcome = Outcome("figure")
    outcome.require(2 < 1, "2 is not below 1")
    return outcome


def die(_) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    return Outcome()


def hang(_) -> Outcome:
    """Start a rank that hangs as well, and report both process ids on standard output."""
    rank = os.fork()
    if rank:
        print(f"processes {os.getpid()} {rank}", flush=True)
    time.sleep(1000)
    return Outcome()


def check(number: int, function: str, limit_s: float = 60.0) -> Check:
    return Check(number, function, limit_s, f"{__name__}:{function}")


@pytest.mark.slow
def test_a_check_that_fails_dies_or_hangs_leaves_the_others_alone(tmp_path, capsys):
    results = Results(tmp_path / "results.json", MACHINE, fresh=False)
    names = ["fail", "find_a_problem", "die", "hang", "succeed"]
    checks = [check(number, name, 5.0 if name == "hang" else 60.0) for number, name in enumerate(names)]
    assert not run_part(checks, "cpu", results)
    entries = json.loads((tmp_path / "results.json").read_text())["checks"]
    assert [entry["status"] for entry in entries.values()] == [FAIL, FAIL, FAIL, FAIL, PASS]
    assert [entry["problems"] for entry in entries.values()] == [
        ["ValueError: the GPU is on fire"],
        ["2 is not below 1"],
        [f"the process ended with exit code {-signal.SIGKILL}"],
        ["no result within 5 s"],
        [],
    ]
    assert "Traceback" in entries["0"]["values"]["log"]
    assert entries["4"]["values"] == {"earlier": [0, 1, 2, 3]}
    output = capsys.readouterr().out.splitlines()
    assert output[1] == " 1  find_a_problem                 figure  FAIL: 2 is not below 1"
    assert output[4] == " 4  succeed                        fine  pass"
    processes = re.search(r"processes (\d+) (\d+)", entries["3"]["values"]["log"])
    assert not any(is_running(int(process)) for process in processes.groups())


def is_running(process: int) -> bool:
    """Return whether a process exists that has not ended; one that has may wait to be reaped."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_passed_check_runs_again_only_for_another_fingerprint_or_fresh(tmp_path, capsys):
    path, checks = tmp_path / "results.json", [check(0, "succeed"), check(1, "fail")]
    run_part(checks, "cpu", Results(path, MACHINE, fresh=False))
    capsys.readouterr()
    run_part(checks, "cpu", Results(path, MACHINE, fresh=False))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("pass (earlier)") and "FAIL: ValueError" in second
    for machine, fresh in ((MACHINE | {"fingerprint": "two"}, False), (MACHINE, True)):
        run_part(checks[:1], "cpu", Results(path, machine, fresh))
        assert capsys.readouterr().out.endswith("fine  pass\n")


def test_checks_that_a_part_has_no_time_for_are_not_reached(tmp_path):
    results = Results(tmp_path / "results.json", MACHINE, fresh=False)
    assert not run_part([check(0, "succeed")], "cpu", results, limit_s=0.0)
    assert results.checks["0"]["status"] == NOT_REACHED


def test_the_limits_of_a_part_fit_into_eight_minutes():
    assert [check.number for part in PARTS for check in part] == list(range(12))
    assert all(sum(check.limit_s for check in part) <= 480 for part in PARTS)


def test_missing_prerequisites_are_named(tmp_path, monkeypatch):
    from benchmarks.gpu import jobs, saving, speed

    context = CheckContext("cuda", tmp_path)
    with pytest.raises(Unavailable, match="check 6 has no result"):
        speed.best_run(context)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(5e9))
    with pytest.raises(Unavailable, match="5 GB of free space for a checkpoint of 19 GB; set TMPDIR"):
        saving.require_space(context, ["model=gpt_1b3"])
    monkeypatch.setattr(jobs, "in_process", lambda _: (1, (2, 27, 5)))
    with pytest.raises(Unavailable, match=r"one GPU with NCCL 2\.27\.5; use several GPUs"):
        jobs.check(context)


def return_infinity(_) -> Outcome:
    return Outcome(values={"error": math.inf, "losses": [math.nan, 1.0]})


def test_values_that_are_not_finite_become_null(tmp_path):
    checks = [check(0, "return_infinity")]
    assert run_part(checks, "cpu", Results(tmp_path / "out.json", MACHINE, fresh=False))
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["checks"]["0"]["values"] == {"error": None, "losses": [None, 1]}


def test_kernels_are_summed_by_name_and_sorted_by_time(tmp_path):
    from benchmarks.gpu.speed import kernels

    recorded = [("kernel", "a", 100), ("kernel", "b", 300), ("kernel", "a", 100), ("cpu_op", "c", 900)]
    lines = [{"cat": category, "name": name, "dur": duration} for category, name, duration in recorded]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*lines, {"ph": "M", "name": "a"}]}, file)
    assert kernels(tmp_path / "trace.json.gz", 1e-3, "kernel") == [
        {"name": "b", "calls": 1, "ms": 0.3, "share": pytest.approx(0.3)},
        {"name": "a", "calls": 2, "ms": 0.2, "share": pytest.approx(0.2)},
    ]


@pytest.mark.parametrize(
    ("argument", "message"), [("part=4", "part=4: there are 3 parts"), ("device=gpu", "use one of")]
)
def test_a_part_or_a_device_that_does_not_exist_is_rejected(argument, message):
    with pytest.raises(ConfigError, match=message):
        gpu_check.main(["device=cpu", argument])


def test_an_interrupted_command_says_how_it_continues(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "run_part", interrupt)
    assert gpu_check.main(["device=cpu", f"out={tmp_path / 'out.json'}"]) == 130
    assert "interrupted; the same command continues" in capsys.readouterr().out
