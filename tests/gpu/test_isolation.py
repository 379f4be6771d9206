"""The processes, results and measurements of checks on a GPU. Needs no GPU."""

import ast
import ctypes
import gzip
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt4d.config.machine import this_machine
from gpt4d.parallel import compile
from tests.gpu import compiling, conftest, test_layers, test_ranks, test_runs, test_speed, usage
from tests.gpu.check import Check, NotPossible, Unavailable
from tests.gpu.isolation import run_isolated
from tests.gpu.processes import in_process
from tests.gpu.results import COMPILE_S, FAIL, NOT_POSSIBLE, PART_S, PASS, REPOSITORY, Results, table
from tests.gpu.runs import measured_runs


def run_checks(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "tests/gpu", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.full
def test_a_rehearsal_runs_all_checks_on_the_cpu_and_a_second_one_skips_them(tmp_path):
    out = tmp_path / "results" / "rehearsal.json"
    done = run_checks("--device=cpu", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^tests/gpu/\S+ .*  pass", done.stdout, re.MULTILINE)) == len(markers())
    checks = json.loads(out.read_text())["checks"]
    assert sorted(map(int, checks)) == list(range(len(markers())))
    assert all(entry["status"] == PASS and entry["rehearsal"] for entry in checks.values())
    assert checks["10"]["values"]["cache_layers"] == checks["6"]["values"]["best"]["cache_layers"] == "all"
    assert len(re.findall(r"^ part \d", done.stdout, re.MULTILINE)) == 3
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    done = run_checks("--device=cpu", f"--out={out}", "--part=2")
    assert done.returncode == 0 and "4 skipped" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_a_gpu_all_checks_are_skipped_and_the_command_fails():
    done = run_checks("--part=1")
    assert done.returncode == 1 and "7 skipped" in done.stdout
    assert "checks on a GPU were skipped: torch finds no GPU; use a machine that has one" in done.stdout


def behave(kind: str, check: Check) -> None:
    """Do what a check may do. One that hangs starts a rank that hangs, and prints both process ids."""
    match kind:
        case "succeeds":
            check.figure, check.values = "fine", {"earlier": sorted(check.earlier)}
        case "fails":
            raise ValueError("the GPU\nis on fire")
        case "lacks a library":
            raise NotPossible("no library")
        case "finds a problem":
            check.require(2 < 1, "2 is not below 1")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            rank = os.fork()
            if rank:
                print(f"processes {os.getpid()} {rank}", flush=True)
            threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "problems", "log"),
    [
        ("succeeds", [], None),
        ("fails", ["ValueError: the GPU is on fire"], "Traceback"),
        ("lacks a library", [], None),
        ("finds a problem", ["2 is not below 1"], ""),
        ("dies", [f"the process ended with exit code {-signal.SIGKILL}"], ""),
        ("hangs", ["no result within 5 s"], "processes"),
    ],
)
def test_a_check_that_fails_dies_or_hangs_reports_its_problem_and_leaves_no_process(tmp_path, kind, problems, log):
    limit_s = 5 if kind == "hangs" else 60
    done = run_isolated(partial(behave, kind), Check("cpu", tmp_path, earlier={3: {}}), limit_s, os.environ)
    assert done.problems == problems
    assert log is None or log in done.values["log"]
    assert done.missing == ("no library" if kind == "lacks a library" else "")
    if kind == "succeeds":
        assert (done.figure, done.values) == ("fine", {"earlier": [3]})
    if kind == "hangs":
        processes = re.search(r"processes (\d+) (\d+)", done.values["log"])
        assert all(ends(int(process)) for process in processes.groups())


def ends(process: int) -> bool:
    """Wait until a process has ended. Return false if it takes a minute."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as file:
        return bool(select.select([file], [], [], 60)[0])


def test_results_remain_for_the_same_machine_unless_fresh_and_have_null_for_nan(tmp_path):
    path, machine = tmp_path / "results.json", {"torch": "2.11"}
    results = Results(path, "cuda", machine, fresh=False)
    results.add(1, {"status": FAIL, "values": {"error": math.inf, "losses": [math.nan, 1.0]}})
    results.add(0, {"status": PASS, "values": {"rate": 3}})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    again, not_finite = Results(path, "cuda", machine, fresh=False), {"error": None, "losses": [None, 1]}
    assert (again.passed(0), again.passed(1), again.passed(2)) == (True, False, False)
    assert again.values() == {0: {"rate": 3}, 1: not_finite} and list(again.checks) == ["0", "1"]
    for other, fresh in (({"torch": "2.12"}, False), (machine, True)):
        assert not Results(path, "cuda", other, fresh).checks


def markers() -> list[dict[str, float]]:
    """Return the arguments of the markers of all checks."""
    return [
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.gpu"
    ]


def test_the_limits_of_a_part_fit_into_eight_minutes():
    assert sorted(marker["number"] for marker in markers()) == list(range(len(markers())))
    limits = Counter()
    for marker in markers():
        limits[marker["part"]] += marker["limit_s"]
        assert COMPILE_S * marker.get("functions", 0) + marker["work_s"] < marker["limit_s"], marker
    assert limits.keys() == {1, 2, 3} and max(limits.values()) <= PART_S


def fake_check(**settings: float) -> SimpleNamespace:
    """Return a test of pytest with a marker ``gpu``, alone in its session."""
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[conftest._STARTS] = {}
    marker = SimpleNamespace(kwargs=settings)
    item = SimpleNamespace(name="test_it", obj=None, config=config, get_closest_marker=lambda _: marker)
    item.session = SimpleNamespace(items=[item])
    return item


def test_a_check_may_use_the_time_that_earlier_checks_of_its_part_leave():
    settings = [(0, 1, 30), (2, 1, 100), (12, 1, 50), (9, 3, 70)]
    checks = [fake_check(number=number, part=part, limit_s=limit_s) for number, part, limit_s in settings]
    for check in checks:
        check.session.items = checks
    assert [conftest._limit_s(check) for check in checks] == [30, 130, 180, 70]


def test_a_rehearsal_adds_the_times_of_a_gpu_by_part():
    stated = {1: {"part": 1, "limit_s": 90, "functions": 12, "work_s": 5}, 12: {"part": 1, "limit_s": 30, "work_s": 7}}
    text = table({str(number): {"seconds": 10.4, "budget": values} for number, values in stated.items()})
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "10", "60", "5", "75", "90"] in lines and ["12", "10", "0", "7", "17", "30"] in lines
    assert ["part", "1", "21", "60", "12", "93", "480"] in lines


def test_checks_share_the_cache_of_compiled_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    first, second = conftest.environment("cuda"), conftest.environment("cuda")
    assert first == second and first["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    assert {Path(first[name]).parent.parent for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")} == {tmp_path}


def test_a_check_that_is_not_possible_neither_passes_nor_fails(tmp_path, monkeypatch):
    item = fake_check(number=9, part=3, limit_s=60, work_s=1)
    results = Results(tmp_path / "out.json", "cuda", {}, fresh=False)
    item.config.stash[conftest._RESULTS] = results
    item.funcargs = {"check": Check("cuda", tmp_path), "results": results}
    monkeypatch.setattr(conftest, "run_isolated", lambda body, check, *_: replace(check, missing="no library"))
    with pytest.raises(pytest.skip.Exception, match="not possible here: no library"):
        conftest.pytest_pyfunc_call(item)
    assert results.checks["9"]["status"] == NOT_POSSIBLE and not results.passed(9)
    lines: list[str] = []
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), item.config)
    assert lines == ["check 9 neither passed nor failed: not possible here: no library"]


def test_missing_prerequisites_are_named(tmp_path, monkeypatch):
    check = Check("cuda", tmp_path)
    with pytest.raises(Unavailable, match="check 6 has no result"):
        measured_runs(check)
    usage_of_disk = namedtuple("usage_of_disk", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage_of_disk(5e9))
    with pytest.raises(Unavailable, match="5 GB of free space for a checkpoint of 19 GB; set TMPDIR"):
        test_runs.require_space(check, test_runs.checkpoint_bytes(["model=gpt_1b3"]))
    monkeypatch.setattr(test_ranks, "in_process", lambda _: (1, (2, 29, 7)))
    with pytest.raises(NotPossible, match=r"need NCCL 2\.30, and torch has loaded 2\.29\.7; use several GPUs"):
        test_ranks.test_ranks_train_and_reshard_and_name_a_hang_and_a_lost_rank(check)
    usage.require_shared_gpu((2, 30, 7))


def test_the_version_of_nccl_is_that_of_the_loaded_library(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 43 /venv/nccl/lib/libnccl.so.2\n"
    )

    class Library:
        def __init__(self, path: str):
            assert path == "/venv/nccl/lib/libnccl.so.2"

        def ncclGetVersion(self, number) -> int:
            number._obj.value = 23007
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))  # with which torch was built
    assert usage.nccl_version(maps) == (2, 30, 7)
    maps.write_text("")  # NCCL is a part of torch's own library
    assert usage.nccl_version(maps) == (2, 29, 7)
    assert usage.decoded_version(2708) == (2, 7, 8)


def test_a_process_that_has_composed_a_configuration_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(this_machine, "cache_info", lambda: namedtuple("info", "currsize")(1))
    with pytest.raises(AssertionError, match="has used CUDA, and cannot be forked"):
        in_process(int)


@pytest.mark.parametrize("factor", [1, 1.1])
def test_a_wrong_compiled_kernel_fails_check_1(tmp_path, monkeypatch, factor):
    """torch.compile is replaced by a wrapper that scales the results of kernels by a factor."""

    def scaled(function, **_):
        def call(*args):
            results = function(*args)
            return tuple(x if x is None else x * factor for x in results) if isinstance(results, tuple) else results

        return call

    check = Check("cpu", tmp_path)
    monkeypatch.setattr(torch, "compile", scaled)
    monkeypatch.setattr(compile, "compiled", {})
    monkeypatch.setattr(compiling, "enable", lambda device: None)
    monkeypatch.setattr(compiling, "num_graphs", lambda: 1)
    monkeypatch.setattr(test_layers, "CASES", {name: test_layers.CASES[name] for name in ("RMS norm", "attention")})
    monkeypatch.setattr(test_layers, "_check_kernels", lambda *_: None)
    test_layers.test_layers_agree_with_float64_on_the_cpu(check)
    assert (factor == 1) == (not check.problems)
    assert all("RMS norm in bfloat16 compiled" in problem for problem in check.problems)


def test_the_use_of_gpus_is_compared_with_the_plan(tmp_path):
    listed = "GPU-a, 11\nGPU-b, 12\nGPU-a, 12\n"
    assert usage.contexts(listed) == {"GPU-a": 2, "GPU-b": 1}
    line = "a:1:2 [0] NCCL INFO ncclCommInitRankConfig comm 0x5f rank 1 nranks {} cudaDev 0 busId 1 - Init {}\n"
    (tmp_path / "nccl.7").write_text(line.format(2, "START") + line.format(2, "COMPLETE") + line.format(4, "COMPLETE"))
    assert usage.communicators(tmp_path, 7) == [2, 4] and usage.communicators(tmp_path, 8) == []
    good = test_ranks.Usage([2, 2, 2], 3, 3.0, 1.0, 3.5, Counter({"GPU-a": 1, "GPU-b": 1}))
    faults = {
        "communicators of [2, 2, 2, 2] ranks, 3 planned": good._replace(communicators=[2] * 4),
        "take 3.50 GiB of GPU 0, 3.00 planned": good._replace(used_gib=4.5),
        "the GPUs have [1, 2] contexts of the job, not [1, 1]": good._replace(contexts=Counter(usage.contexts(listed))),
        "": good,
    }
    for problem, first in faults.items():
        check = Check("cuda", tmp_path)
        test_ranks.check_usage(check, [first, good], Counter(), gpus=2)
        assert len(check.problems) == bool(problem) and problem in "".join(check.problems)


def test_kernels_and_idle_time_come_from_the_trace(tmp_path):
    recorded = [("kernel", "a", 0, 100), ("kernel", "b", 50, 300), ("kernel", "a", 400, 100), ("cpu_op", "c", 0, 900)]
    lines = [{"cat": category, "name": name, "ts": ts, "dur": dur} for category, name, ts, dur in recorded]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*lines, {"ph": "M", "name": "a"}]}, file)
    events = test_speed.device_events(tmp_path / "trace.json.gz", ["kernel"])
    assert test_speed.idle_share(events) == pytest.approx(50 / 500)
    assert test_speed.kernels(events, 1e-3) == [
        {"name": "b", "calls": 1, "ms": 0.3, "share": pytest.approx(0.3)},
        {"name": "a", "calls": 2, "ms": 0.2, "share": pytest.approx(0.2)},
    ]
