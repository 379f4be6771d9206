"""Detection of activities without progress on all ranks."""

import sys
import threading
import time
import traceback
from pathlib import Path

from gpt4d.runtime.activity import Activity, Track

MIN_LIMIT_S = 10.0  # replaces parallel.timeout_s if that is shorter: file systems may be slow for some seconds
_BUSY = 0.001  # minimum CPU share of a working thread; a thread that uses a slow disk exceeds it
PACKAGE_ROOT = str(Path(__file__).parents[1])
_INFRASTRUCTURE = tuple(str(Path(PACKAGE_ROOT, name)) for name in ("activity.py", "runtime/consensus.py"))


class ActivityWatch:
    """Watches one track. The watchdog calls it with every heartbeat.

    A working rank has no time limit while it makes progress: its thread computes, or it calls ``activity.progress``.
    The ranks add up their progress in the store, because one rank's progress extends the wait of all ranks.
    """

    def __init__(self, track: Track):
        self.track = track
        self._activity: Activity | None = None
        self._progress, self._cpu_s, self._sampled_at = 0, 0.0, 0.0  # the activity's state at the last heartbeat
        self._count, self._changed_at = -1, 0.0  # progress of all ranks, and when it last increased

    def progressed(self) -> bool | None:
        """Return whether this rank's activity has progressed since the last call; None if it is new or absent."""
        activity, before = self.track.current, self._activity
        self._activity = activity
        if activity is None:
            return None
        now, cpu_s = time.monotonic(), _cpu_seconds(activity.thread)
        computes = cpu_s - self._cpu_s > _BUSY * (now - self._sampled_at)
        progressed = activity.unlimited or activity.progress != self._progress or (computes and not activity.waits)
        self._progress, self._cpu_s, self._sampled_at = activity.progress, cpu_s, now
        return progressed if activity is before else None

    def note(self, count: int) -> None:
        """Record ``count``, the total progress of all ranks of the job."""
        if count != self._count:
            self._count, self._changed_at = count, time.monotonic()

    def waiting(self, since: float) -> dict | None:
        """Return this rank's activity and the seconds since any rank made progress; None between activities.

        The keys are the keys of HangDetector.waiting and ``works``, whether this rank works itself. Seconds count from
        ``since`` (``time.monotonic``) or later.
        """
        activity = self.track.current
        if activity is None:
            return None
        return {
            "axis": self.track.name,
            "name": activity.name,
            "number": activity.number,
            "s": time.monotonic() - max(activity.started, self._changed_at, since),
            "layer": None,
            "works": not activity.waits,
        }

    def where(self) -> str | None:
        """Return the code line that this rank's activity is in; None between activities."""
        return code_line([stack(activity.thread)]) if (activity := self.track.current) else None


def stack(thread: int) -> traceback.StackSummary:
    """Return the current stack of the thread with this identifier."""
    return traceback.extract_stack(sys._current_frames().get(thread))


def code_line(stacks: list[traceback.StackSummary]) -> str:
    """Return the innermost line of gpt4d's code in the first stack that has one: ``optim.py:40 (update)``."""
    ours = [
        f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
        for frames in stacks
        for frame in reversed(frames)
        if frame.filename.startswith(PACKAGE_ROOT) and frame.filename not in _INFRASTRUCTURE
    ]
    return ours[0] if ours else str(stacks[-1][-1])


def _cpu_seconds(thread: int) -> float:
    """Return the CPU time of a thread, or of the process if the system does not report threads."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.process_time()
    if thread not in {running.ident for running in threading.enumerate()}:  # an ended thread has no clock
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
