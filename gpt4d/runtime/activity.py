"""Work and waits of a rank outside the collectives of an axis, recorded for the watchdog.

There are two tracks of activities: one for the main thread, and one for the thread that saves checkpoints. All ranks
begin the same activities in the same order on each track. An activity consists of this rank's work and of waits for
other ranks.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Activity:
    """One activity of a thread."""

    name: str  # the name in reports, such as "reading the metrics of step 5"
    number: int  # index of the activity on its track, from 1
    thread: int  # identifier of the thread
    started: float  # time.monotonic of its beginning
    waits: bool = False  # this rank waits for other ranks and does not work
    unlimited: bool = False  # its work has no time limit, even without visible progress
    progress: int = 0  # increases with every visible progress of its work

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the body as a wait for other ranks."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


class Track:
    """The activities of one thread, in sequence.

    Attributes:
        current: the activity that has not ended, None between activities.
        begun: number of activities that have begun.
    """

    def __init__(self, name: str):
        self.name = name
        self.current: Activity | None = None
        self.begun = 0

    @contextmanager
    def begin(self, name: str) -> Iterator[Activity]:
        """Begin the next activity, which ends with the body. The body must not begin another on this track."""
        assert self.current is None, f"{name} within {self.current.name}"
        self.begun += 1
        self.current = _local.activity = Activity(name, self.begun, threading.get_ident(), time.monotonic())
        try:
            yield self.current
        finally:
            self.current = _local.activity = None

    @property
    def finished(self) -> int:
        """Number of activities in which this rank has no work left before other ranks can continue."""
        current = self.current
        return self.begun - (1 if current and not current.waits else 0)


MAIN, SAVE = Track("main"), Track("save")
_local = threading.local()  # the thread's activity


def progress() -> None:
    """Tell the watchdog that this thread's activity, if any, makes progress."""
    if activity := getattr(_local, "activity", None):
        activity.progress += 1


@contextmanager
def unlimited() -> Iterator[None]:
    """Exempt the body from the limit on work without progress, for waits for other programs, disks or networks."""
    activity: Activity | None = getattr(_local, "activity", None)
    if not activity or activity.unlimited:
        yield
        return
    activity.unlimited = True
    try:
        yield
    finally:
        activity.unlimited = False
