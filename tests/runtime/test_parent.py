"""A process ends when its parent is killed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.environment import REPOSITORY

CHILD = """
import sys, time
from gpt4d.runtime.parent import end_with_parent
case = sys.argv[2]
if case == "other system":
    sys.platform = "darwin"
if case == "parent ended before":
    print("ready", flush=True)
    sys.stdin.read()
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(3600)
"""
PARENT = """
import os, subprocess, sys, time
child, case, pipe = sys.argv[1], sys.argv[2], int(sys.argv[3]) or os.pipe()[0]
command = [sys.executable, "-c", child, str(pipe), case]
subprocess.Popen(command, pass_fds=[pipe], stdin=subprocess.PIPE)
time.sleep(3600)
"""


@pytest.mark.parametrize("case", ["kernel alone", "other system", "parent ended before"])
def test_a_process_ends_when_its_parent_is_killed(case):
    pipe = os.pipe() if case == "kernel alone" else ()  # this process keeps the write end
    command = [sys.executable, "-c", PARENT, CHILD, case, str(pipe[0] if pipe else 0)]
    parent = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, pass_fds=pipe[:1], start_new_session=True
    )
    try:
        assert parent.stdout.readline() == "ready\n"
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate(timeout=60)  # returns once the child has closed standard output, too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        for descriptor in pipe:
            os.close(descriptor)
