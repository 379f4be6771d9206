"""A long search of the planner: its progress on a terminal, and fewer collections of garbage."""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SILENT_S = 1.0  # time after which a terminal shows progress, and interval of its updates
_THRESHOLD = 1_000_000  # objects between two collections; recordings are many objects without cycles


@contextmanager
def long_search() -> Iterator[None]:
    """Show on a terminal for how long the planner has been working, if that is longer than a second."""
    ended, started, thresholds = threading.Event(), time.monotonic(), gc.get_threshold()

    def show() -> None:
        while not ended.wait(_SILENT_S):
            print(f"\rplanning for {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    gc.set_threshold(_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        ended.set()
        if thread.ident:
            thread.join()
            print("\r\033[K", end="", file=sys.stderr, flush=True)  # clear the line
