"""The processes and results of checks on a GPU: a check that fails, dies or hangs fails alone. Needs no GPU."""

import ast
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
from collections import Counter, namedtuple
from pathlib import Path

import pytest

from tests.gpu import test_ranks, test_saving, test_speed
from tests.gpu.check import Check, Unavailable
from tests.gpu.isolation import run_isolated
from tests.gpu.results import FAIL, PASS, REPOSITORY, Results
from tests.gpu.runs import best_run


def run_checks(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "tests/gpu", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.full
def test_a_rehearsal_runs_all_checks_on_the_cpu_and_a_second_one_skips_them(tmp_path):
    out = tmp_path / "results" / "rehearsal.json"
    done = run_checks("--device=cpu", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^tests/gpu/\S+ .*  pass", done.stdout, re.MULTILINE)) == 12
    written = json.loads(out.read_text())
    assert list(written["checks"]) == [str(number) for number in range(12)]
    assert all(entry["status"] == PASS and entry["rehearsal"] for entry in written["checks"].values())
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    done = run_checks("--device=cpu", f"--out={out}", "--part=2")
    assert done.returncode == 0 and "3 skipped" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_a_gpu_all_checks_are_skipped_and_the_command_fails():
    done = run_checks("--part=1")
    assert done.returncode == 1 and "6 skipped" in done.stdout
    assert "checks on a GPU were skipped: torch finds no GPU; use a machine that has one" in done.stdout


def succeed(check: Check) -> None:
    check.figure, check.values = "fine", {"earlier": sorted(check.earlier)}


def fail(check: Check) -> None:
    raise ValueError("the GPU\nis on fire")


def find_a_problem(check: Check) -> None:
    check.figure = "figure"
    check.require(2 < 1, "2 is not below 1")


def die(check: Check) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(check: Check) -> None:
    """Start a rank that hangs, and hang. Report both process ids on standard output."""
    rank = os.fork()
    if rank:
        print(f"processes {os.getpid()} {rank}", flush=True)
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "problems", "log"),
    [
        (succeed, [], None),
        (fail, ["ValueError: the GPU is on fire"], "Traceback"),
        (find_a_problem, ["2 is not below 1"], ""),
        (die, [f"the process ended with exit code {-signal.SIGKILL}"], ""),
    ],
)
def test_a_check_that_fails_or_dies_reports_its_problem(tmp_path, body, problems, log):
    done = run_isolated(body, Check("cpu", tmp_path, earlier={3: {}}), 60, os.environ)
    assert done.problems == problems
    assert log is None or log in done.values["log"]
    if body is succeed:
        assert (done.figure, done.values) == ("fine", {"earlier": [3]})


@pytest.mark.slow
def test_a_check_that_hangs_leaves_no_process(tmp_path):
    done = run_isolated(hang, Check("cpu", tmp_path), 5, os.environ)
    assert done.problems == ["no result within 5 s"]
    processes = re.search(r"processes (\d+) (\d+)", done.values["log"])
    assert not any(is_running(int(process)) for process in processes.groups())


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended. A process that has ended may wait to be reaped."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_results_remain_for_the_same_machine_unless_fresh(tmp_path):
    path, machine = tmp_path / "results.json", {"torch": "2.11"}
    results = Results(path, "cuda", machine, fresh=False)
    results.add(1, {"status": FAIL, "values": {}})
    results.add(0, {"status": PASS, "values": {"rate": 3}})
    again = Results(path, "cuda", machine, fresh=False)
    assert (again.passed(0), again.passed(1), again.passed(2)) == (True, False, False)
    assert again.values() == {0: {"rate": 3}, 1: {}} and list(again.checks) == ["0", "1"]
    for other, fresh in (({"torch": "2.12"}, False), (machine, True)):
        assert not Results(path, "cuda", other, fresh).checks


def test_values_that_are_not_finite_become_null(tmp_path):
    results = Results(tmp_path / "out.json", "cuda", {}, fresh=False)
    results.add(0, {"status": PASS, "values": {"error": math.inf, "losses": [math.nan, 1.0]}})
    document = json.loads(results.path.read_text(), parse_constant=pytest.fail)
    assert document["checks"]["0"]["values"] == {"error": None, "losses": [None, 1]}


def test_the_limits_of_a_part_fit_into_eight_minutes():
    markers = [
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.gpu"
    ]
    assert sorted(marker["number"] for marker in markers) == list(range(12))
    limits = Counter()
    for marker in markers:
        limits[marker["part"]] += marker["limit_s"]
    assert limits.keys() == {1, 2, 3} and max(limits.values()) <= 480


def test_missing_prerequisites_are_named(tmp_path, monkeypatch):
    check = Check("cuda", tmp_path)
    with pytest.raises(Unavailable, match="check 6 has no result"):
        best_run(check)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(5e9))
    with pytest.raises(Unavailable, match="5 GB of free space for a checkpoint of 19 GB; set TMPDIR"):
        test_saving.require_space(check, ["model=gpt_1b3"])
    monkeypatch.setattr(test_ranks, "in_process", lambda _: (1, (2, 27, 5)))
    with pytest.raises(Unavailable, match=r"one GPU with NCCL 2\.27\.5; use several GPUs"):
        test_ranks.test_ranks_train_and_reshard_and_name_a_hang_and_a_lost_rank(check)


def test_kernels_are_summed_by_name_and_sorted_by_time(tmp_path):
    recorded = [("kernel", "a", 100), ("kernel", "b", 300), ("kernel", "a", 100), ("cpu_op", "c", 900)]
    lines = [{"cat": category, "name": name, "dur": duration} for category, name, duration in recorded]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*lines, {"ph": "M", "name": "a"}]}, file)
    assert test_speed.kernels(tmp_path / "trace.json.gz", 1e-3, "kernel") == [
        {"name": "b", "calls": 1, "ms": 0.3, "share": pytest.approx(0.3)},
        {"name": "a", "calls": 2, "ms": 0.2, "share": pytest.approx(0.2)},
    ]
