"""A process reacts to a first and to a second stop signal."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
from gpt4d.runtime.signals import Stopped, listen_for_signals
with listen_for_signals(announce=True) as stop:
    {}
"""


def start_process(body: str) -> subprocess.Popen:
    """Start a process that runs ``body`` and wait until it has printed ``ready``."""
    command = [sys.executable, "-c", PROGRAM.format(body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    assert process.stdout.readline() == "ready\n"
    return process


# As in a collective, the main thread is blocked outside of the interpreter, so Python's signal handlers do not run.
BLOCKED = "print('ready', flush=True); os.read(os.pipe()[0], 1)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_process_that_has_nothing_to_save(number):
    with start_process(BLOCKED) as process:
        process.send_signal(number)
        assert process.wait(60) == 75
        assert process.stdout.read() == f"{signal.Signals(number).name}: stopped immediately\n"


def test_the_first_deferred_signal_is_recorded_and_a_later_one_ends_it():
    with start_process(f"with stop.deferred(): {BLOCKED}") as process:
        process.send_signal(signal.SIGUSR1)
        process.stdout.readline()
        assert process.stdout.readline().startswith("SIGUSR1: saving and stopping after the next step")
        while process.poll() is None:  # a signal within a second counts as the same one
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 75


def test_stopped_ends_the_process_with_exit_code_75():
    with start_process("print('ready', flush=True)\n    raise Stopped") as process:
        assert process.wait(60) == 75


def test_previous_signal_handlers_are_restored():
    from gpt4d.runtime.signals import listen_for_signals

    before = signal.getsignal(signal.SIGUSR1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with listen_for_signals():
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before and len(os.listdir("/proc/self/fd")) == descriptors
