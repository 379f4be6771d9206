"""The environment of a test run: private directories, no network, no GPU and no settings of the user.

The process of pytest that a person starts creates a directory with the home, the temporary files and the working
directory of all tests. ``reaper.py`` ends all processes of the run and removes the directory when this process has
ended, even if it was killed.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = "GPT4D_TEST_RUN"  # every process of a run has its directory in this variable
_OWNER = "GPT4D_TEST_OWNER"  # id of the process that created the directory
_KEPT = re.compile(
    "PATH|LANG|LC_.*|TERM|USER|LOGNAME|SHELL|COLUMNS|VIRTUAL_ENV|LD_LIBRARY_PATH|OPENBLAS_.*|PYTHON(?!PATH).*"
    "|PYTEST_.*|COV.*|GPT4D_.*|(CUDA|ROCM|HIP|NVIDIA|NCCL)_.*"
)
_HIDDEN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
HIDDEN = {name: os.environ.get(name) for name in _HIDDEN}  # original values, which only tests/gpu uses


def isolate() -> None:
    """Hide the variables and the files of the user from this process."""
    if os.environ.get(_OWNER) != str(os.getppid()):  # else a worker of pytest-xdist
        _create()
    run = Path(os.environ[RUN])
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    os.environ.clear()
    os.environ.update(
        kept,
        HOME=str(run / "home"),
        TMPDIR=str(run),
        PYTHONPATH=str(REPOSITORY),
        OMP_NUM_THREADS="1",  # a rank computes on one thread, as on a shared machine
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        WANDB_SILENT="true",
    )
    tempfile.tempdir = None  # pytest may have asked for the old one


def leave_working_directory() -> None:
    """Move this process to a directory of its own."""
    os.chdir(tempfile.mkdtemp(prefix="work-"))


def _create() -> None:
    """Create the directory of a run, and start the process that removes it."""
    run = tempfile.mkdtemp(prefix="gpt4d-tests-")
    Path(run, "home").mkdir()
    others = {name: value for name, value in os.environ.items() if name not in (RUN, _OWNER)}
    reaper = [sys.executable, str(Path(__file__).with_name("reaper.py")), run, str(os.getpid())]
    # In a session of its own, because signals of a terminal end all processes of the tests' session.
    subprocess.Popen(reaper, env=others, start_new_session=True, stdin=subprocess.DEVNULL)
    os.environ.update({RUN: run, _OWNER: str(os.getpid())})
