"""The tests do not depend on what a user has, change nothing of it, and leave no process behind."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.clone import copied_repository
from tests.support.environment import REPOSITORY, RUN
from tests.support.grids import full
from tests.support.planted import VARIABLES, plant_home, plant_runs
from tests.support.reaper import processes_of

HANGING = """
import os, signal, subprocess

def write_id(directory, process):
    open(f"{directory}/{process}.new", "w").close()
    os.replace(f"{directory}/{process}.new", f"{directory}/{process}")

def hang(directory):
    write_id(directory, os.getpid())
    signal.pause()

def test_hangs(ranks):
    write_id(DIRECTORY, subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    ranks.run(2, hang, DIRECTORY)
"""
SAMPLE = ("data/test_vocabulary.py", "planner/test_machine.py", "runtime/test_launchers.py", "test_length.py")
PYTEST = [sys.executable, "-m", "pytest"]
TIMEOUT_S = 120


def wait_until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGKILL, ["-n1"]), full(signal.SIGINT, ["-n1"]), full(signal.SIGINT, []), full(signal.SIGHUP, [])],
)
def test_no_process_and_no_file_outlives_a_test_run_that_a_signal_ends(number, workers, tmp_path):
    ids, module = tmp_path / "ids", tmp_path / "test_hanging.py"
    ids.mkdir()
    module.write_text(HANGING.replace("DIRECTORY", repr(str(ids))))
    command = [*PYTEST, "-c", str(REPOSITORY / "pyproject.toml"), "-p", "tests.conftest", *workers]
    with subprocess.Popen([*command, str(module)], cwd=tmp_path, stdout=subprocess.DEVNULL) as run:
        wait_until(lambda: len([name for name in os.listdir(ids) if name.isdigit()]) == 3 or run.poll() is not None)
        assert run.poll() is None
        directory = psutil.Process(int(os.listdir(ids)[0])).environ()[RUN]
        assert directory != os.environ[RUN] and len(processes_of(directory)) >= 4  # also the process that forks ranks
        run.send_signal(number)
    wait_until(lambda: not processes_of(directory) and not os.path.exists(directory))


@pytest.mark.slow
def test_tests_pass_beside_runs_settings_and_variables_of_a_user_and_change_none(tmp_path):
    home = plant_home(tmp_path / "home")
    with copied_repository() as clone:
        plant_runs(clone)
        environment = {**os.environ, **VARIABLES, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        before = {path: path.stat().st_mtime_ns for root in (clone, home) for path in root.rglob("*")}
        chosen = ["-m", "not ranks and not full", *(f"tests/{name}" for name in SAMPLE)]
        done = subprocess.run([*PYTEST, *chosen], cwd=clone, env=environment, capture_output=True, text=True)
        after = {path: path.stat().st_mtime_ns for root in (clone, home) for path in root.rglob("*")}
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) > 50, done.stdout + done.stderr
    assert after == before
