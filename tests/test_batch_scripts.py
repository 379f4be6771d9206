"""The batch scripts of PBS and Flux, with stand-ins for the commands of the schedulers."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import REPOSITORY

AWKWARD = ["a=b c", "said='\"it\"'", "blend={x: 0.5, 'y z': 0.5}", "glob=*.txt", "$HOME=$(date)", "", "back\\"]
NODES = ["x3006c0s13b1n0.hsn.cm.polaris", "x3006c0s19b0n0.hsn.cm.polaris"]

# The launcher records its arguments and exits with CODE; with CODE=wait it asks its script to stop, and saves.
LAUNCHER = """#!/bin/bash
printf '%s\\0' "$@" > "$STAND_IN/arguments"
echo "$MASTER_ADDR ${WORLD_SIZE:-}" > "$STAND_IN/environment"
[ "$CODE" = wait ] || exit "$CODE"
trap 'exit 75' USR1
kill -TERM "$PPID"
while :; do read -rt 0.1 <> <(:); done
"""
QSTAT = """#!/bin/bash
echo "    Resource_List.walltime = $WALLTIME"
"""
FLUX = """#!/bin/bash
case "$1 $2" in
    "getattr jobid") echo f2fXJSYU4Y ;;
    "hostlist --expand") echo tuolumne1001 ;;
    "hostlist --count") echo 2 ;;
    "hostlist local") echo "tuolumne[1001-1002]" ;;
    "job timeleft") echo 3600 ;;
    "submit "*) printf '%s\\0' "$@" > "$STAND_IN/arguments"; echo "$MASTER_ADDR" > "$STAND_IN/environment"; echo f3 ;;
    "job attach")
        [ "$CODE" = wait ] || exit "$CODE"
        kill -TERM "$PPID"
        until [ -e "$STAND_IN/killed" ]; do read -rt 0.1 <> <(:); done
        exit 75 ;;
    "job kill") echo "${*:3}" > "$STAND_IN/killed.partial"; mv "$STAND_IN/killed.partial" "$STAND_IN/killed" ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def batch(tmp_path):
    """Return a function that runs a script, or bash without one, in a batch job on two nodes."""
    for name, text in (("mpiexec", LAUNCHER), ("qstat", QSTAT), ("flux", FLUX)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("\n".join(NODES) + "\n")

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "STAND_IN": str(tmp_path),
            "GPT4D_VENV": sys.prefix, "GPT4D_OFI_PLUGIN": str(tmp_path), "PBS_JOBID": "7.polaris",
            "PBS_NODEFILE": str(tmp_path / "nodes"), "WALLTIME": "01:00:00", "CODE": "0", **environment,
        }  # fmt: skip
        command = ["bash", *([str(REPOSITORY / "scripts" / script)] if script else []), *arguments]
        return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=60)

    return run


def received(tmp_path: Path) -> tuple[list[str], str]:
    """Return the arguments after train.py, and the options before it."""
    arguments = (tmp_path / "arguments").read_text().split("\0")[:-1]
    program = arguments.index("train.py")
    return arguments[program + 1 :], " ".join(arguments[: program - 1])


@pytest.mark.parametrize(
    ("script", "per_node"), [("pbs/polaris.sh", 4), ("pbs/aurora.sh", 12), ("flux/tuolumne.sh", 4)]
)
def test_a_script_starts_all_ranks_with_the_overrides(batch, tmp_path, script, per_node):
    flux = script.startswith("flux")
    result = batch(script, *AWKWARD) if flux else batch(script, "last=1", GPT4D_ARGS=shlex.join(AWKWARD))
    assert result.returncode == 0, result.stderr
    overrides, options = received(tmp_path)
    host = (tmp_path / "environment").read_text()
    if flux:
        assert (overrides, host) == (AWKWARD, "tuolumne1001\n")
        assert options.startswith(f"submit --nodes=2 --tasks-per-node={per_node} --exclusive ")
    else:
        assert (overrides, host) == ([*AWKWARD, "last=1"], f"{NODES[0]} {2 * per_node}\n")
        assert f"-n {2 * per_node} --ppn {per_node} --hostfile {tmp_path / 'nodes'} --cpu-bind list:" in options
        assert options.partition("list:")[2].count(":") == per_node - 1, "each rank has its own cores"


@pytest.mark.parametrize("script", ["pbs/polaris.sh", "flux/tuolumne.sh"])
def test_a_failure_ends_the_job_with_its_exit_code(batch, script):
    result = batch(script, CODE="3")
    assert result.returncode == 3 and "resume" not in result.stderr


@pytest.mark.parametrize("code", ["75", "wait"])
@pytest.mark.parametrize("script", ["pbs/polaris.sh", "flux/tuolumne.sh"])
def test_an_unfinished_run_shows_the_command_that_resumes_it(batch, tmp_path, script, code):
    """``wait``: the run saves after TERM, which the script passes on as USR1."""
    result = batch(script, "a=b c", CODE=code, GPT4D_ARGS="")
    assert result.returncode == 75
    command = result.stderr.splitlines()[-1].partition("unfinished; resume with: ")[2]
    if script.startswith("pbs"):
        assignment, *words = shlex.split(command)
        assert shlex.split(assignment.removeprefix("GPT4D_ARGS=")) == ["a=b c"]
        assert words == ["qsub", "-v", "GPT4D_ARGS", "-l", "select=2", "scripts/pbs/polaris.sh"]
    else:
        assert shlex.split(command) == ["flux", "batch", "--nodes=2", "scripts/flux/tuolumne.sh", "a=b c"]
        assert code == "75" or (tmp_path / "killed").read_text() == "--signal=USR1 f3\n"
    assert (": TERM: unfinished" in result.stderr) == (code == "wait")


def test_a_script_warns_itself_before_the_time_limit(batch):
    """PBS does not warn a job."""
    count = 'SECONDS=5; warn_after() { echo "$1"; }; warn_before_limit'
    result = batch("", "-c", f". scripts/pbs/common.sh; {count}", WALLTIME="01:02:03")
    assert 3723 - 5 - 300 - int(result.stdout) in (0, 1)  # a second may pass
    result = batch("", "-c", f". scripts/pbs/common.sh; {count}", WALLTIME="")
    assert result.stderr.endswith("qstat does not show the time limit: the run is not warned\n")
    wait = "warn_after 1; run_step bash -c 'trap \"exit 75\" USR1; while :; do read -rt 0.1 <> <(:); done'"
    result = batch("", "-c", f". scripts/pbs/common.sh; {wait}; finish $? same")
    assert result.returncode == 75 and "USR1: unfinished; resume with: same" in result.stderr


def test_missing_prerequisites_are_reported_in_one_line(batch, tmp_path):
    for script, command in (("pbs/polaris.sh", "qsub"), ("flux/tuolumne.sh", "flux batch")):
        outside = batch(script, GPT4D_HOME=str(tmp_path))
        assert outside.returncode == 1 and f"call {command} there, or set GPT4D_HOME" in outside.stderr
        environment = batch(script, GPT4D_VENV=str(tmp_path))
        assert environment.returncode == 1 and f"there is no {tmp_path}/bin/python" in environment.stderr
    assert "start it with qsub" in batch("pbs/polaris.sh", PBS_JOBID="").stderr
