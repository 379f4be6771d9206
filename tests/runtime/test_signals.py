"""A process reacts to a first and to a second stop signal."""

import fcntl
import os
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.environment import REPOSITORY
from tests.support.grids import full

PROGRAM = """
import os, sys, time
from gpt4d.runtime.signals import Stopped, listen_for_signals
with listen_for_signals(announce=True) as stop:
    {}
"""


def start_process(body: str, *launcher: str) -> subprocess.Popen:
    """Start a process that runs ``body`` and wait until it has printed ``ready``."""
    command = [*launcher, sys.executable, "-c", PROGRAM.format(body)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    assert process.stdout.readline() == "ready\n"
    return process


# As in a collective, the main thread is blocked outside of the interpreter, so Python's signal handlers do not run.
BLOCKED = "print('ready', flush=True); os.read(os.pipe()[0], 1)"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, *map(full, (signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU))],
    ids=lambda number: number.name,
)
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


@pytest.mark.parametrize("number", [signal.SIGXCPU, full(signal.SIGHUP)], ids=lambda s: s.name)
def test_a_signal_that_the_system_repeats_does_not_end_a_process_that_saves(number):
    body = f"""
    stop.announce = False
    import gpt4d.runtime.signals; gpt4d.runtime.signals.DUPLICATE_S = 0.0
    with stop.deferred():
        os.kill(os.getpid(), {int(number)})
        while not stop.signal: time.sleep(0.001)
        received = stop.receive
        stop.receive = lambda number: (received(number), os.write(1, b"received again"), os._exit(3))
        print("ready", flush=True)
        os.kill(os.getpid(), {int(number)})
        time.sleep(60)
    """
    with start_process(body) as process:
        assert process.wait(60) == 3 and process.stdout.read() == "received again"


def take_terminal() -> None:
    """Make standard input the terminal of this process, whose loss ends it: the tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_lost_terminal_saves_and_ends_with_exit_code_75(tmp_path):
    """The kernel sends SIGHUP when the terminal closes, and every print fails from then on."""
    body = f"""
    from gpt4d.config.commands import allow_lost_output
    allow_lost_output()
    with stop.deferred():
        print("ready", flush=True)
        while not stop.signal: time.sleep(0.001)
        print("step 1, loss 2.0", flush=True)
        open({str(tmp_path / "saved")!r}, "w").close()
        raise Stopped
    """
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    output = b""
    while b"ready" not in output:
        output += os.read(master, 100)
    os.close(master)
    assert process.wait(60) == 75 and (tmp_path / "saved").exists()


def test_nohup_keeps_a_process_that_loses_its_terminal():
    with start_process(BLOCKED, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert process.stdout.read() == "SIGTERM: stopped immediately\n"


def test_ctrl_c_ends_train_py_without_a_traceback_while_it_imports(tmp_path):
    (tmp_path / "hydra.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "train.py"], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


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
