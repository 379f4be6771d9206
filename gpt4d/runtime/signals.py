"""Stop and go on: a signal asks a run to save and end. Slurm's warnings, preemption and Ctrl-C all come as signals."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 75  # EX_TEMPFAIL: there is more to do; the same command goes on
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_S = 1.0  # a launcher hands on what the terminal has sent already: within this time that is one signal


class Stopped(SystemExit):
    """Ends a run that has saved what it had, with ``EXIT_CODE``."""

    def __init__(self):
        super().__init__(EXIT_CODE)


class StopRequest:
    """Whether this process has been asked to stop: ``asked`` is the signal's name, None until then."""

    def __init__(self, told: bool = False):
        """``told``: whether this process says that it has heard."""
        self.asked: str | None = None
        self.told = told
        self._since = 0.0
        self._deferring = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal is only noted, for the run to end when it has saved; another ends it at once.

        Outside, there is nothing to save, and the first ends the process.
        """
        self._deferring = True
        yield
        self._deferring = False  # not after an error: a launcher's signals must not keep it from being told

    def hear(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.asked and now - self._since <= _SAME_S:
            return
        if self.asked or not self._deferring:
            end_at_once(f"{name}: ended at once" if self.told else "")
        self.asked, self._since = name, now
        if self.told:
            print(f"\n{name}: this run ends after its next step and a save; once more, and it ends at once", flush=True)


@contextlib.contextmanager
def listening(told: bool = False) -> Iterator[StopRequest]:
    """From here on TERM, INT and USR1 ask to stop. For the main thread.

    A thread of its own hears them: Python's handlers wait for the main thread, which may be waiting for another rank.
    """
    request = StopRequest(told)
    hearing, telling = os.pipe()
    os.set_blocking(telling, False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)

    def hear() -> None:
        while numbers := os.read(hearing, 64):
            for number in numbers:
                if number in _SIGNALS:
                    request.hear(number)

    thread = threading.Thread(target=hear, name="signals", daemon=True)
    thread.start()
    try:
        yield request
    except Stopped:
        end_at_once()  # srun ends the ranks that take longer than the first, and would tell of that
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(telling)
        thread.join()
        os.close(hearing)


def end_at_once(words: str = "") -> None:
    """Ends this process, with ``EXIT_CODE``, whatever its other threads are about."""
    if words:
        print(words, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_CODE)
