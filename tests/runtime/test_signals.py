"""What a process does when it is asked to stop, and when it is asked again."""

import os
import signal
import subprocess
import sys

import pytest

WAIT = """
import os, sys, time
from gpt4d.runtime.signals import Stopped, listening
with listening(told=True) as stop:
    {}
"""


def waiting(body: str) -> subprocess.Popen:
    """A process that has said that it waits."""
    command = [sys.executable, "-c", WAIT.format(body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    assert process.stdout.readline() == "ready\n"
    return process


# As in a collective: the main thread is not in the interpreter, where Python's own handlers would run.
BLOCKED = "print('ready', flush=True); os.read(os.pipe()[0], 1)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_before_there_is_anything_to_save_a_signal_ends_the_process(number):
    with waiting(BLOCKED) as process:
        process.send_signal(number)
        assert process.wait(60) == 75
        assert process.stdout.read() == f"{signal.Signals(number).name}: ended at once\n"


def test_while_there_is_the_first_is_noted_and_a_later_one_ends_it():
    with waiting(f"with stop.deferred(): {BLOCKED}") as process:
        process.send_signal(signal.SIGUSR1)
        process.stdout.readline()
        assert process.stdout.readline().startswith("SIGUSR1: this run ends after its next step and a save")
        while process.poll() is None:  # what comes within a second is taken for the same
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 75


def test_a_run_that_has_saved_ends_with_75():
    with waiting("print('ready', flush=True)\n    raise Stopped") as process:
        assert process.wait(60) == 75


def test_afterwards_signals_do_what_they_did_before():
    from gpt4d.runtime.signals import listening

    before = signal.getsignal(signal.SIGUSR1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with listening():
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before and len(os.listdir("/proc/self/fd")) == descriptors
