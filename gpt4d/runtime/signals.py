"""Preemption and resume: a signal (Slurm's warning, a preemption, Ctrl-C, a lost terminal) asks a run to save and exit.

This module imports nothing that takes time, so that train.py can call ``end_on_signals`` first of all.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 75  # EX_TEMPFAIL: the run is unfinished; the same command resumes it
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
# Kernel, shell and launcher each send a SIGHUP, and SIGXCPU comes every second. So a repeated one is not a user's wish.
_REPEATED = ("SIGHUP", "SIGXCPU")
DUPLICATE_S = 1.0  # a launcher forwards signals of the terminal: within this time, both count as one signal


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. SIGHUP is excluded under ``nohup``, which ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if not (number == signal.SIGHUP and ignored)]


def end_on_signals() -> None:
    """Let every stop signal end this process with ``EXIT_CODE``, until ``listen_for_signals`` is called."""
    for number in stop_signals():
        signal.signal(number, lambda *_: exit_immediately())


class Stopped(SystemExit):
    """Ends a run that has saved its state, with ``EXIT_CODE``."""

    def __init__(self):
        super().__init__(EXIT_CODE)


class StopRequest:
    """A request to stop this process. ``signal`` is the name of the signal, None until one arrives."""

    def __init__(self, announce: bool = False):
        """``announce``: print a message when a signal arrives."""
        self.signal: str | None = None
        self.announce = announce
        self._received_at = 0.0
        self._deferring = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first signal inside the context, so that the run can save and exit. A second one ends the process.

        Outside the context there is nothing to save, and the first signal ends the process.
        """
        self._deferring = True
        yield
        self._deferring = False  # skipped after an error, which must be reported before a signal ends this

    def receive(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.signal and (name in _REPEATED or now - self._received_at <= DUPLICATE_S):
            return
        if self.signal or not self._deferring:
            exit_immediately(f"{name}: stopped immediately" if self.announce else "")
        self.signal, self._received_at = name, now
        if self.announce:
            print(f"\n{name}: saving and stopping after the next step; send it again to stop immediately", flush=True)


@contextlib.contextmanager
def listen_for_signals(announce: bool = False) -> Iterator[StopRequest]:
    """Turn stop signals into a StopRequest while the body runs. Call it on the main thread.

    A separate thread receives them, because Python's signal handlers run on the main thread, which may be blocked in a
    collective.

    Args:
        announce: print a message when a signal arrives.
    """
    request = StopRequest(announce)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def receive_signals() -> None:
        while numbers := os.read(read_end, 64):
            for number in numbers:
                if number in previous_handlers:
                    request.receive(number)

    thread = threading.Thread(target=receive_signals, name="signals", daemon=True)
    thread.start()
    try:
        yield request
    except Stopped:
        exit_immediately()  # srun ends ranks that exit later than the first, and reports it as a failure
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def exit_immediately(message: str = "", code: int = EXIT_CODE) -> None:
    """End this process with ``code``, without waiting for its threads."""
    if message:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
